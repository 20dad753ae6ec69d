// The C interface, as `binding.py` mirrors it. Plain structs of pointers and sizes; nothing owns what it points to.
#pragma once

#include <cstdint>

#define PD_API extern "C" __attribute__((visibility("default")))

// A weight in panels of 16 outputs, `[ceil(out / 16)][in][16]`, missing outputs 0. In bfloat16 a panel's 16 values
// are eight 32-bit words, each with output n in its low half and output n + 8 in its high half.
struct PdMatrix {
  const void* panels;
  int32_t in_features;
  int32_t out_features;
};

// The pages of one layer group: `[slots][num_layers][2][kv_heads][tokens_per_block][head_dim]`.
struct PdPool {
  void* pages;
  int32_t num_layers;
  int32_t tokens_per_block;
  int32_t window;       // a query sees the last `window` positions, its own among them; 0: all
  int32_t sink_tokens;  // and the first so many positions
};

struct PdLayer {
  PdMatrix qkv;            // queries, keys, values
  PdMatrix attention_out;  //
  PdMatrix gate_up;        // panels of gate and up in turn; out_features counts both, each padded to 16
  PdMatrix down;           //
  const float* attention_norm;
  const float* mlp_norm;
  int32_t group;           // which pool
  int32_t layer_in_group;  //
};

struct PdModel {
  int32_t is_bfloat16;  // weights and pages; else float32
  int32_t num_layers;
  int32_t hidden_size;
  int32_t intermediate_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;  // a multiple of 8
  int32_t num_pools;
  float rms_norm_eps;
  PdMatrix embedding;  // vocab_size x hidden_size, in panels like any other
  PdMatrix head;
  const float* final_norm;  // norms are padded with 0 to a multiple of 16
  const float* cos;         // [max_position][head_dim / 2]
  const float* sin;
  const PdLayer* layers;
  const PdPool* pools;
};

struct PdStep {
  int32_t num_rows;
  int32_t num_sequences;
  int32_t num_drawn;
  int32_t num_threads;
  const int32_t* token_ids;   // [num_rows]
  const int32_t* first_rows;  // [num_sequences + 1]
  const int32_t* starts;      // [num_sequences] position of a sequence's first row
  const int32_t* const* block_tables;   // [num_pools] -> all sequences' slots, one after another; -1: not there
  const int32_t* const* table_offsets;  // [num_pools] -> [num_sequences]
  const int32_t* drawn_rows;            // [num_drawn]
  float* logits;                        // [num_drawn][vocab_size]
};

PD_API int pd_abi_version();
PD_API int pd_is_supported();  // whether this CPU has the instructions that the library was built for
PD_API const char* pd_exactness_class();
PD_API void* pd_create(const PdModel* model);
PD_API void pd_destroy(void* engine);
PD_API int pd_forward(void* engine, const PdStep* step);  // 0, or 1: no memory, and nothing was written
PD_API void pd_multiply(const PdMatrix* matrix, int is_bfloat16, const float* rows, int num_rows, float* out,
                        int num_threads);
PD_API double pd_read_gb_s(const void* memory, int64_t num_bytes, int num_threads);
PD_API double pd_peak_gflop_s(int num_threads);
