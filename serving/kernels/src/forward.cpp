// The forward pass: one call per step, from token ids to the logits of the rows that draw.
//
// The residual stream and all rows are float32 in either format; bfloat16 is how weights and pages are kept. Buffers
// have rows of a multiple of 16 values, of which those past the true width stay 0.
#include <omp.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "kernels.h"
#include "matmul.h"
#include "team.h"
#include "vector.h"

namespace pd {
namespace {

constexpr int kPhasesPerLayer = 8;
constexpr int kOtherPhases = 4;

size_t padded(int width) { return (static_cast<size_t>(width) + kPanel - 1) / kPanel * kPanel; }

class Engine {
 public:
  virtual ~Engine() = default;
  virtual void forward(const PdStep& step) = 0;
};

// What one thread needs for itself.
template <bool kBfloat16>
struct Scratch {
  Scratch(const PdModel& model, size_t max_depth)
      : attention(model.num_heads / model.num_kv_heads, model.head_dim), widened(2 * max_depth * kPanel) {}

  Attention<kBfloat16> attention;
  std::vector<float> widened;
};

template <bool kBfloat16>
class Llama : public Engine {
 public:
  explicit Llama(const PdModel& model)
      : model_(model), layers_(model.layers, model.layers + model.num_layers),
        pools_(model.pools, model.pools + model.num_pools), hidden_stride_(padded(model.hidden_size)),
        qkv_width_((model.num_heads + 2 * model.num_kv_heads) * model.head_dim), qkv_stride_(padded(qkv_width_)),
        attended_stride_(padded(model.num_heads * model.head_dim)), gated_stride_(padded(model.intermediate_size)) {}

  void forward(const PdStep& step) override {
    reserve(step);
    Shared shared(step.num_threads, kPhasesPerLayer * model_.num_layers + kOtherPhases);
    if (step.num_threads == 1) {
      Team team(shared, 0);
      return run(step, team);
    }
#pragma omp parallel num_threads(step.num_threads)
    {
      Team team(shared, omp_get_thread_num());
      run(step, team);
    }
  }

 private:
  void reserve(const PdStep& step) {
    const size_t rows = step.num_rows;
    if (hidden_.size() < rows * hidden_stride_) {
      hidden_.assign(rows * hidden_stride_, 0.0f);
      normed_.assign(rows * hidden_stride_, 0.0f);
      qkv_.assign(rows * qkv_stride_, 0.0f);
      attended_.assign(rows * attended_stride_, 0.0f);
      gated_.assign(rows * gated_stride_, 0.0f);
    }
    const size_t depth = std::max({hidden_stride_, attended_stride_, gated_stride_});
    while (static_cast<int>(scratch_.size()) < step.num_threads)
      scratch_.push_back(std::make_unique<Scratch<kBfloat16>>(model_, depth));
    items_.clear();
    positions_.resize(rows);
    for (int n = 0; n < step.num_sequences; ++n)
      for (int row = step.first_rows[n]; row < step.first_rows[n + 1]; ++row) {
        const int offset = row - step.first_rows[n];
        positions_[row] = {n, step.starts[n] + offset};
        if (offset % kItemQueries == 0)
          items_.push_back({n, row, step.starts[n] + offset, std::min(kItemQueries, step.first_rows[n + 1] - row)});
      }
  }

  void run(const PdStep& step, Team& team) {
    for (int row = team.rank(); row < step.num_rows; row += team.size()) embed(step.token_ids[row], hidden(row));
    team.barrier();
    for (const PdLayer& layer : layers_) run_layer(step, layer, team);
    for (int n = team.rank(); n < step.num_drawn; n += team.size())
      norm(hidden(step.drawn_rows[n]), model_.final_norm, normed(n));
    team.barrier();
    if (step.num_drawn)
      multiply(team, model_.head, normed_, hidden_stride_, step.num_drawn,
               StoreTiles{step.logits, static_cast<size_t>(model_.head.out_features), model_.head.out_features});
    team.barrier();
  }

  void run_layer(const PdStep& step, const PdLayer& layer, Team& team) {
    const int rows = step.num_rows;
    norm_rows(team, rows, layer.attention_norm);
    multiply(team, layer.qkv, normed_, hidden_stride_, rows, StoreTiles{qkv_.data(), qkv_stride_, static_cast<int>(qkv_stride_)});
    team.barrier();
    for (int row = team.rank(); row < rows; row += team.size()) place_row(step, layer, row);
    team.barrier();
    attend(step, layer, team);
    team.barrier();
    multiply(team, layer.attention_out, attended_, attended_stride_, rows, AddTiles{hidden_.data(), hidden_stride_});
    team.barrier();
    norm_rows(team, rows, layer.mlp_norm);
    multiply(team, layer.gate_up, normed_, hidden_stride_, rows, GateTiles{gated_.data(), gated_stride_});
    team.barrier();
    multiply(team, layer.down, gated_, gated_stride_, rows, AddTiles{hidden_.data(), hidden_stride_});
    team.barrier();
  }

  template <class Write>
  void multiply(Team& team, const PdMatrix& matrix, const std::vector<float>& rows, size_t stride, int num_rows,
                Write write) {
    float* widened = scratch_[team.rank()]->widened.data();
    Product<kBfloat16, Write>(matrix, rows.data(), stride, write, widened).run(team, num_rows);
  }

  void embed(int token, float* to) const {
    const char* panel = panel_at<kBfloat16>(model_.embedding, token / kPanel);
    const int column = token % kPanel;
    for (int k = 0; k < model_.hidden_size; ++k) {
      if constexpr (kBfloat16) {
        const int place = 2 * (column % kLanes) + column / kLanes;
        to[k] = from_bfloat16(reinterpret_cast<const uint16_t*>(panel)[k * kPanel + place]);
      } else {
        to[k] = reinterpret_cast<const float*>(panel)[k * kPanel + column];
      }
    }
  }

  void norm_rows(Team& team, int num_rows, const float* weight) {
    for (int row = team.rank(); row < num_rows; row += team.size()) norm(hidden(row), weight, normed(row));
    team.barrier();
  }

  void norm(const float* row, const float* weight, float* to) const {
    Vec squares = zero();
    for (size_t n = 0; n < hidden_stride_; n += kLanes) squares = fma(load(row + n), load(row + n), squares);
    const float mean = sum_of_lanes(squares) / static_cast<float>(model_.hidden_size);
    const Vec scale = splat(1.0f / std::sqrt(mean + model_.rms_norm_eps));
    for (size_t n = 0; n < hidden_stride_; n += kLanes)
      store(to + n, _mm256_mul_ps(_mm256_mul_ps(load(row + n), scale), load(weight + n)));
  }

  // Rotates and scales a row's queries where they are; rotates its keys into its page, with its values.
  void place_row(const PdStep& step, const PdLayer& layer, int row) {
    const auto [sequence, position] = positions_[row];
    const int half = model_.head_dim / 2;
    const float* cos = model_.cos + static_cast<size_t>(position) * half;
    const float* sin = model_.sin + static_cast<size_t>(position) * half;
    const float scale = 1.0f / std::sqrt(static_cast<float>(model_.head_dim));
    float* from = qkv_.data() + row * qkv_stride_;
    for (int head = 0; head < model_.num_heads; ++head, from += model_.head_dim) rotate(from, cos, sin, scale);
    float* values = from + model_.num_kv_heads * model_.head_dim;
    const PdPool& pool = pools_[layer.group];
    for (int head = 0; head < model_.num_kv_heads; ++head) {
      const KeyPlace place = key_place(step, layer, sequence, head);
      const int slot = place.slots[position / pool.tokens_per_block];
      const size_t offset = static_cast<size_t>(position % pool.tokens_per_block) * model_.head_dim * kItemBytes;
      char* to = static_cast<char*>(pool.pages) + slot * place.slot_bytes + place.layer_bytes + offset;
      rotate(from, cos, sin, 1.0f);
      put(from, to);
      put(values, to + place.values_bytes);
      from += model_.head_dim;
      values += model_.head_dim;
    }
  }

  void rotate(float* head, const float* cos, const float* sin, float scale) const {
    const int half = model_.head_dim / 2;
    for (int n = 0; n < half; ++n) {
      const float first = head[n], second = head[n + half];
      head[n] = (first * cos[n] - second * sin[n]) * scale;
      head[n + half] = (second * cos[n] + first * sin[n]) * scale;
    }
  }

  void put(const float* from, char* to) const {
    if constexpr (kBfloat16) {
      for (int d = 0; d < model_.head_dim; ++d) reinterpret_cast<uint16_t*>(to)[d] = to_bfloat16(from[d]);
    } else {
      std::memcpy(to, from, model_.head_dim * sizeof(float));
    }
  }

  KeyPlace key_place(const PdStep& step, const PdLayer& layer, int sequence, int head) const {
    const PdPool& pool = pools_[layer.group];
    const size_t head_bytes = static_cast<size_t>(pool.tokens_per_block) * model_.head_dim * kItemBytes;
    const size_t values_bytes = head_bytes * model_.num_kv_heads;
    return {static_cast<const char*>(pool.pages),
            step.block_tables[layer.group] + step.table_offsets[layer.group][sequence],
            2 * values_bytes * pool.num_layers,
            2 * values_bytes * layer.layer_in_group + head_bytes * head,
            values_bytes,
            pool.tokens_per_block,
            model_.head_dim};
  }

  void attend(const PdStep& step, const PdLayer& layer, Team& team) {
    const int heads_per_kv = model_.num_heads / model_.num_kv_heads;
    const long num_tickets = static_cast<long>(items_.size()) * model_.num_kv_heads;
    for (long ticket; (ticket = team.ticket()) < num_tickets;) {
      const AttentionItem& item = items_[ticket / model_.num_kv_heads];
      const int head = static_cast<int>(ticket % model_.num_kv_heads);
      const size_t first = static_cast<size_t>(head) * heads_per_kv * model_.head_dim;
      scratch_[team.rank()]->attention.run(item, key_place(step, layer, item.sequence, head), pools_[layer.group],
                                           qkv_.data() + item.first_row * qkv_stride_ + first, qkv_stride_,
                                           attended_.data() + item.first_row * attended_stride_ + first,
                                           attended_stride_);
    }
  }

  float* hidden(int row) { return hidden_.data() + row * hidden_stride_; }
  float* normed(int row) { return normed_.data() + row * hidden_stride_; }

  static constexpr size_t kItemBytes = kBfloat16 ? 2 : 4;

  const PdModel model_;
  const std::vector<PdLayer> layers_;
  const std::vector<PdPool> pools_;
  const size_t hidden_stride_;
  const int qkv_width_;
  const size_t qkv_stride_;
  const size_t attended_stride_;
  const size_t gated_stride_;
  std::vector<float> hidden_, normed_, qkv_, attended_, gated_;
  std::vector<AttentionItem> items_;
  std::vector<std::pair<int, int>> positions_;  // of each row: its sequence, its position
  std::vector<std::unique_ptr<Scratch<kBfloat16>>> scratch_;
};

template <bool kBfloat16>
void multiply_alone(const PdMatrix& matrix, const float* rows, int num_rows, float* out, int num_threads) {
  Shared shared(num_threads, 2);
  const auto depth = static_cast<size_t>(matrix.in_features);
#pragma omp parallel num_threads(num_threads)
  {
    Team team(shared, omp_get_thread_num());
    std::vector<float> widened(2 * depth * kPanel);
    const StoreTiles write{out, static_cast<size_t>(matrix.out_features), matrix.out_features};
    Product<kBfloat16, StoreTiles>(matrix, rows, depth, write, widened.data()).run(team, num_rows);
  }
}

}  // namespace
}  // namespace pd

int pd_abi_version() { return 1; }

// Raise the number with every change that moves a bit of a result.
const char* pd_exactness_class() { return "native-1"; }

int pd_is_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

void* pd_create(const PdModel* model) {
  if (model->is_bfloat16) return static_cast<pd::Engine*>(new pd::Llama<true>(*model));
  return static_cast<pd::Engine*>(new pd::Llama<false>(*model));
}

void pd_destroy(void* engine) { delete static_cast<pd::Engine*>(engine); }

int pd_forward(void* engine, const PdStep* step) {
  try {
    static_cast<pd::Engine*>(engine)->forward(*step);
  } catch (const std::bad_alloc&) {  // before the threads start; they allocate nothing
    return 1;
  }
  return 0;
}

void pd_multiply(const PdMatrix* matrix, int is_bfloat16, const float* rows, int num_rows, float* out, int num_threads) {
  if (is_bfloat16) return pd::multiply_alone<true>(*matrix, rows, num_rows, out, num_threads);
  pd::multiply_alone<false>(*matrix, rows, num_rows, out, num_threads);
}
