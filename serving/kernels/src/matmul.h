// rows x weight, over packed panels of 16 outputs.
//
// Exact by construction (E1): an output element is one chain of fused multiply-adds over k = 0, 1, 2, ... in one
// lane, whatever the number of rows, their place, the blocking and the thread. Only what shares a register changes.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels.h"
#include "team.h"
#include "vector.h"

namespace pd {

constexpr int kPanel = 16;
constexpr int kMaxTileRows = 6;
constexpr int kMaxTilePanels = 4;

inline int panels_of(const PdMatrix& matrix) { return (matrix.out_features + kPanel - 1) / kPanel; }

// A panel's two vectors at one k.
template <bool kBfloat16>
inline void load_panel(const void* panel, size_t k, Vec* low, Vec* high) {
  if constexpr (kBfloat16) {
    const auto* words = static_cast<const __m256i*>(panel) + k;
    const __m256i pairs = _mm256_loadu_si256(words);
    *low = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    *high = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  } else {
    const float* values = static_cast<const float*>(panel) + k * kPanel;
    *low = load(values);
    *high = load(values + kLanes);
  }
}

template <bool kBfloat16>
inline const char* panel_at(const PdMatrix& matrix, int panel) {
  const size_t bytes = static_cast<size_t>(matrix.in_features) * kPanel * (kBfloat16 ? 2 : 4);
  return static_cast<const char*>(matrix.panels) + bytes * panel;
}

// kRows x (kPanels * 16) outputs into `tile`, [kRows][kPanels * 16].
template <int kRows, int kPanels, bool kBfloat16>
inline void multiply_tile(const float* rows, size_t row_stride, const char* panels, size_t panel_bytes, int depth,
                          float* tile) {
  Vec sums[kRows][kPanels][2];
  for (auto& row : sums)
    for (auto& panel : row) panel[0] = panel[1] = zero();
  for (int k = 0; k < depth; ++k) {
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      const char* panel = panels + p * panel_bytes;
      Vec low, high;
      load_panel<kBfloat16>(panel, k, &low, &high);
      // The hardware's own prefetch stops at each 4 KiB page, which a thin product meets every few hundred cycles.
      if constexpr (kRows <= 3) _mm_prefetch(panel + static_cast<size_t>(k) * (kBfloat16 ? 32 : 64) + 2048, _MM_HINT_T0);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const Vec value = broadcast(rows + m * row_stride + k);
        sums[m][p][0] = fma(value, low, sums[m][p][0]);
        sums[m][p][1] = fma(value, high, sums[m][p][1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      store(tile + (m * kPanels + p) * kPanel, sums[m][p][0]);
      store(tile + (m * kPanels + p) * kPanel + kLanes, sums[m][p][1]);
    }
}

// Where a product's tiles go: `write(first_row, num_rows, first_panel, num_panels, tile)`.
struct StoreTiles {
  float* out;
  size_t stride;
  int columns;  // of `out` that may be written

  void operator()(int row, int num_rows, int panel, int num_panels, const float* tile) const {
    const int first = panel * kPanel;
    const int width = std::min(num_panels * kPanel, columns - first);
    for (int m = 0; m < num_rows; ++m)
      std::copy_n(tile + m * num_panels * kPanel, width, out + (row + m) * stride + first);
  }
};

struct AddTiles {
  float* out;
  size_t stride;

  void operator()(int row, int num_rows, int panel, int num_panels, const float* tile) const {
    for (int m = 0; m < num_rows; ++m) {
      float* to = out + (row + m) * stride + panel * kPanel;
      for (int n = 0; n < num_panels * kPanel; n += kLanes)
        store(to + n, _mm256_add_ps(load(to + n), load(tile + m * num_panels * kPanel + n)));
    }
  }
};

// Panels come in pairs of gate and up: out = silu(gate) * up.
struct GateTiles {
  float* out;
  size_t stride;

  void operator()(int row, int num_rows, int panel, int num_panels, const float* tile) const {
    for (int m = 0; m < num_rows; ++m)
      for (int pair = 0; pair < num_panels / 2; ++pair) {
        const float* gate = tile + (m * num_panels + 2 * pair) * kPanel;
        float* to = out + (row + m) * stride + (panel / 2 + pair) * kPanel;
        for (int n = 0; n < kPanel; n += kLanes) {
          const Vec g = load(gate + n);
          const Vec sigmoid = _mm256_div_ps(g, _mm256_add_ps(splat(1.0f), exp(_mm256_sub_ps(zero(), g))));
          store(to + n, _mm256_mul_ps(sigmoid, load(gate + kPanel + n)));
        }
      }
  }
};

// One product as a team computes it.
template <bool kBfloat16, class Write>
class Product {
 public:
  // `widened` is scratch of this thread, [2][in_features][16].
  Product(const PdMatrix& matrix, const float* rows, size_t row_stride, Write write, float* widened)
      : matrix_(matrix), rows_(rows), stride_(row_stride), write_(write), widened_(widened) {}

  void run(Team& team, int num_rows) {
    const int panels = panels_of(matrix_);
    const int block = std::min(num_rows, rows_per_block());
    const int blocks = (num_rows + block - 1) / block;
    const int group = panels_per_ticket(panels, team.size());
    const long groups = (panels + group - 1) / group;
    for (long ticket; (ticket = team.ticket()) < groups * blocks;) {
      const int first_row = static_cast<int>(ticket / groups) * block;
      const int first_panel = static_cast<int>(ticket % groups) * group;
      multiply(first_row, std::min(block, num_rows - first_row), first_panel, std::min(panels, first_panel + group));
    }
  }

 private:
  // So many rows stay in the second-level cache while all panels pass.
  int rows_per_block() const {
    const int fitting = (512 << 10) / (4 * matrix_.in_features);
    return std::max(fitting / kMaxTileRows, 4) * kMaxTileRows;
  }

  static int panels_per_ticket(int panels, int num_threads) {
    if (num_threads == 1) return panels;
    const int wanted = panels / (num_threads * 6);
    return std::clamp(wanted / kMaxTilePanels, 1, 16) * kMaxTilePanels;
  }

  void multiply(int row, int num_rows, int panel, int end) {
    switch (num_rows) {
      case 1:
        return thin<1, 4>(row, panel, end);
      case 2:
        return thin<2, 2>(row, panel, end);
      case 3:
        return thin<3, 2>(row, panel, end);
      default:
        return thick(row, num_rows, panel, end);
    }
  }

  template <int kRows, int kPanels>
  void thin(int row, int panel, int end) {
    for (; panel + kPanels <= end; panel += kPanels) tile<kRows, kPanels>(row, panel);
    if constexpr (kPanels > 2)
      for (; panel + 2 <= end; panel += 2) tile<kRows, 2>(row, panel);
    for (; panel < end; ++panel) tile<kRows, 1>(row, panel);
  }

  template <int kRows, int kPanels>
  void tile(int row, int panel) {
    alignas(32) float out[kRows * kPanels * kPanel];
    multiply_tile<kRows, kPanels, kBfloat16>(rows_ + row * stride_, stride_, panel_at<kBfloat16>(matrix_, panel),
                                             panel_bytes(), matrix_.in_features, out);
    write_(row, kRows, panel, kPanels, out);
  }

  void thick(int row, int num_rows, int panel, int end) {
    for (; panel < end; panel += 2) {
      const int num_panels = std::min(2, end - panel);
      if (kBfloat16 && num_rows > 4 * kMaxTileRows) {
        widen(panel, num_panels);
        all_rows<false>(row, num_rows, panel, num_panels, reinterpret_cast<const char*>(widened_));
      } else {
        all_rows<kBfloat16>(row, num_rows, panel, num_panels, panel_at<kBfloat16>(matrix_, panel));
      }
    }
  }

  template <bool kNarrow>
  void all_rows(int row, int num_rows, int panel, int num_panels, const char* panels) {
    const int tiles = (num_rows + kMaxTileRows - 1) / kMaxTileRows;
    for (int n = 0; n < tiles; ++n) {
      const int first = static_cast<int>(static_cast<long>(num_rows) * n / tiles);
      const int last = static_cast<int>(static_cast<long>(num_rows) * (n + 1) / tiles);
      switch (last - first) {
        case 2:
          some_rows<2, kNarrow>(row + first, panel, num_panels, panels);
          break;
        case 3:
          some_rows<3, kNarrow>(row + first, panel, num_panels, panels);
          break;
        case 4:
          some_rows<4, kNarrow>(row + first, panel, num_panels, panels);
          break;
        case 5:
          some_rows<5, kNarrow>(row + first, panel, num_panels, panels);
          break;
        default:
          some_rows<6, kNarrow>(row + first, panel, num_panels, panels);
      }
    }
  }

  template <int kRows, bool kNarrow>
  void some_rows(int row, int panel, int num_panels, const char* panels) {
    const size_t bytes = static_cast<size_t>(matrix_.in_features) * kPanel * (kNarrow ? 2 : 4);
    alignas(32) float one[kRows * kPanel];
    alignas(32) float out[kRows * 2 * kPanel];
    for (int p = 0; p < num_panels; ++p) {
      multiply_tile<kRows, 1, kNarrow>(rows_ + row * stride_, stride_, panels + p * bytes, bytes, matrix_.in_features,
                                       one);
      for (int m = 0; m < kRows; ++m) std::copy_n(one + m * kPanel, kPanel, out + (m * num_panels + p) * kPanel);
    }
    write_(row, kRows, panel, num_panels, out);
  }

  void widen(int panel, int num_panels) {
    for (int p = 0; p < num_panels; ++p)
      for (int k = 0; k < matrix_.in_features; ++k) {
        Vec low, high;
        load_panel<kBfloat16>(panel_at<kBfloat16>(matrix_, panel + p), k, &low, &high);
        float* to = widened_ + (static_cast<size_t>(p) * matrix_.in_features + k) * kPanel;
        store(to, low);
        store(to + kLanes, high);
      }
  }

  size_t panel_bytes() const { return static_cast<size_t>(matrix_.in_features) * kPanel * (kBfloat16 ? 2 : 4); }

  const PdMatrix& matrix_;
  const float* rows_;
  const size_t stride_;
  const Write write_;
  float* const widened_;
};

}  // namespace pd
