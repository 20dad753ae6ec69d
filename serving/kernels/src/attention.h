// Causal attention of a few queries of one sequence and one KV head, over pages in place.
//
// Exact by construction (E1). Keys are taken in tiles that begin at multiples of 128 positions. A score is a sum over
// eight lanes and one tree, whatever its neighbours. Per tile: the largest score so far, the earlier sums scaled to
// it, then weights and values added in the order of positions. A tile or a key that a query does not see adds 0 or is
// left out, which is the same. So a query's result depends on its position and on what it sees.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"
#include "vector.h"

namespace pd {

constexpr int kTileKeys = 128;
constexpr int kItemQueries = 16;

struct AttentionItem {
  int sequence;
  int first_row;   // of the step's rows
  int first_position;
  int num_queries;
};

// Where one sequence's keys and values of one layer and KV head lie.
struct KeyPlace {
  const char* pages;
  const int32_t* slots;
  size_t slot_bytes;
  size_t layer_bytes;  // from a slot's start to this layer's keys of this head
  size_t values_bytes; // from keys to values
  int tokens_per_block;
  int head_dim;
};

template <bool kBfloat16>
class Attention {
 public:
  Attention(int heads_per_kv, int head_dim)
      : heads_per_kv_(heads_per_kv), head_dim_(head_dim), max_rows_(kItemQueries * heads_per_kv),
        scores_(static_cast<size_t>(max_rows_) * kTileKeys), sums_(static_cast<size_t>(max_rows_) * head_dim),
        queries_(max_rows_), most_(max_rows_), total_(max_rows_), scale_(max_rows_), none_(head_dim, 0.0f),
        widened_(kBfloat16 ? 2 * static_cast<size_t>(kTileKeys) * head_dim : 0) {}

  // `queries` is the item's first row of this KV head's query heads, scaled; `out` likewise.
  void run(const AttentionItem& item, const KeyPlace& place, const PdPool& pool, const float* queries,
           size_t query_stride, float* out, size_t out_stride) {
    num_rows_ = item.num_queries * heads_per_kv_;
    for (int row = 0; row < num_rows_; ++row) {
      queries_[row] = queries + (row / heads_per_kv_) * query_stride + (row % heads_per_kv_) * head_dim_;
      most_[row] = -std::numeric_limits<float>::infinity();
      total_[row] = 0.0f;
    }
    std::fill_n(sums_.begin(), static_cast<size_t>(num_rows_) * head_dim_, 0.0f);
    const int end = item.first_position + item.num_queries;
    const int window_start = pool.window ? std::max(0, item.first_position - pool.window + 1) : 0;
    for (int tile = 0; tile < end; tile += kTileKeys) {
      const bool is_seen = tile + kTileKeys > window_start || tile < pool.sink_tokens;
      if (is_seen) add_tile(item, place, pool, tile, std::min(kTileKeys, end - tile));
    }
    for (int row = 0; row < num_rows_; ++row) {
      float* to = out + (row / heads_per_kv_) * out_stride + (row % heads_per_kv_) * head_dim_;
      const Vec total = splat(total_[row]);
      for (int d = 0; d < head_dim_; d += kLanes) store(to + d, _mm256_div_ps(load(sum(row) + d), total));
    }
  }

 private:
  float* score(int row) { return scores_.data() + static_cast<size_t>(row) * kTileKeys; }
  float* sum(int row) { return sums_.data() + static_cast<size_t>(row) * head_dim_; }

  void add_tile(const AttentionItem& item, const KeyPlace& place, const PdPool& pool, int tile, int num_keys) {
    find_keys(place, tile, num_keys);
    int row = 0;
    for (; row + 3 <= num_rows_; row += 3) score_rows<3>(row, num_keys);
    if (num_rows_ - row == 2) score_rows<2>(row, num_keys);
    if (num_rows_ - row == 1) score_rows<1>(row, num_keys);
    for (row = 0; row < num_rows_; ++row) {
      hide(row, item.first_position + row / heads_per_kv_, pool, tile, num_keys);
      weigh(row, num_keys);
    }
    for (row = 0; row + 3 <= num_rows_; row += 3) add_values<3>(row, num_keys);
    if (num_rows_ - row == 2) add_values<2>(row, num_keys);
    if (num_rows_ - row == 1) add_values<1>(row, num_keys);
  }

  // Points at every key and value of the tile; bfloat16 is widened here, once for all queries.
  void find_keys(const KeyPlace& place, int tile, int num_keys) {
    for (int key = 0; key < num_keys; ++key) {
      const int position = tile + key;
      const int slot = place.slots[position / place.tokens_per_block];
      if (slot < 0) {  // its page left the window: hidden from every query
        keys_[key] = values_[key] = none_.data();
        continue;
      }
      const size_t offset = static_cast<size_t>(position % place.tokens_per_block) * head_dim_ * (kBfloat16 ? 2 : 4);
      const char* from = place.pages + slot * place.slot_bytes + place.layer_bytes + offset;
      if constexpr (kBfloat16) {
        keys_[key] = widen(from, key);
        values_[key] = widen(from + place.values_bytes, kTileKeys + key);
      } else {
        keys_[key] = reinterpret_cast<const float*>(from);
        values_[key] = reinterpret_cast<const float*>(from + place.values_bytes);
      }
    }
    for (int key = num_keys; key % 4; ++key) keys_[key] = keys_[num_keys - 1];
  }

  const float* widen(const char* from, int place) {
    float* to = widened_.data() + static_cast<size_t>(place) * head_dim_;
    const auto* narrow = reinterpret_cast<const uint16_t*>(from);
    for (int d = 0; d < head_dim_; d += kLanes) store(to + d, load_bfloat16(narrow + d));
    return to;
  }

  template <int kRows>
  void score_rows(int row, int num_keys) {
    for (int key = 0; key < num_keys; key += 4) {
      Vec products[kRows][4];
      for (auto& of_row : products)
        for (auto& product : of_row) product = zero();
      for (int d = 0; d < head_dim_; d += kLanes) {
        Vec query[kRows];
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) query[r] = load(queries_[row + r] + d);
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) {
          const Vec from = load(keys_[key + n] + d);
#pragma GCC unroll 3
          for (int r = 0; r < kRows; ++r) products[r][n] = fma(query[r], from, products[r][n]);
        }
      }
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r)
        _mm_storeu_ps(score(row + r) + key, sums_of_lanes(products[r][0], products[r][1], products[r][2], products[r][3]));
    }
  }

  // Scores that the query at `position` does not see, and those past the last key, become -infinity.
  void hide(int row, int position, const PdPool& pool, int tile, int num_keys) {
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    float* scores = score(row);
    const int seen_end = std::clamp(position + 1 - tile, 0, num_keys);
    std::fill(scores + seen_end, scores + padded(num_keys), kHidden);
    if (!pool.window) return;
    const int first = std::clamp(pool.sink_tokens - tile, 0, seen_end);
    const int window_start = std::clamp(position + 1 - pool.window - tile, 0, seen_end);
    if (window_start > first) std::fill(scores + first, scores + window_start, kHidden);
  }

  static int padded(int num_keys) { return (num_keys + kLanes - 1) / kLanes * kLanes; }

  // Scores become weights relative to the largest score so far.
  void weigh(int row, int num_keys) {
    float* scores = score(row);
    Vec most = load(scores);
    for (int n = kLanes; n < padded(num_keys); n += kLanes) most = _mm256_max_ps(most, load(scores + n));
    const float before = most_[row];
    most_[row] = std::max(before, max_of_lanes(most));
    if (most_[row] == -std::numeric_limits<float>::infinity()) {  // nothing seen yet: -inf - -inf is no number
      std::fill_n(scores, padded(num_keys), 0.0f);
      scale_[row] = 1.0f;
      return;
    }
    const Vec shift = splat(most_[row]);
    scale_[row] = _mm256_cvtss_f32(exp(splat(before - most_[row])));
    Vec sums = zero();
    for (int n = 0; n < padded(num_keys); n += kLanes) {
      const Vec weights = exp(_mm256_sub_ps(load(scores + n), shift));
      store(scores + n, weights);
      sums = _mm256_add_ps(sums, weights);
    }
    total_[row] = total_[row] * scale_[row] + sum_of_lanes(sums);
  }

  template <int kRows>
  void add_values(int row, int num_keys) {
    int d = 0;
    for (; d + 4 * kLanes <= head_dim_; d += 4 * kLanes) add_some_values<kRows, 4>(row, num_keys, d);
    for (; d < head_dim_; d += kLanes) add_some_values<kRows, 1>(row, num_keys, d);
  }

  template <int kRows, int kVecs>
  void add_some_values(int row, int num_keys, int d) {
    Vec sums[kRows][kVecs];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v)
        sums[r][v] = _mm256_mul_ps(load(sum(row + r) + d + v * kLanes), splat(scale_[row + r]));
    for (int key = 0; key < num_keys; ++key) {
      Vec weights[kRows];
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) weights[r] = broadcast(score(row + r) + key);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const Vec value = load(values_[key] + d + v * kLanes);
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) sums[r][v] = fma(weights[r], value, sums[r][v]);
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) store(sum(row + r) + d + v * kLanes, sums[r][v]);
  }

  const int heads_per_kv_;
  const int head_dim_;
  const int max_rows_;
  int num_rows_ = 0;
  std::vector<float> scores_;   // [rows][128]
  std::vector<float> sums_;     // [rows][head_dim]
  std::vector<const float*> queries_;
  std::vector<float> most_;     // the largest score so far
  std::vector<float> total_;    // the sum of weights so far
  std::vector<float> scale_;    // of the sums of earlier tiles
  const std::vector<float> none_;
  std::vector<float> widened_;  // keys, then values
  const float* keys_[kTileKeys + 3];
  const float* values_[kTileKeys];
};

}  // namespace pd
