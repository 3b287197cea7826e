// The seam between the plan and the instruction-set levels: arguments of each operation, and one table of
// functions per level. Everything a function writes depends only on the row it computes, never on which
// rows, columns or threads share the call.
//
// Layouts
//   packed matrix   [panels][k_padded / 2][16 columns][2] bf16: column n is panel n / 16, lane n % 16; k in
//                   pairs; k and columns beyond the matrix are zero.
//   activations     row-major, bf16 rows padded with zeros to a multiple of 32, float rows unpadded.
//   cache block     [kv head][K plane, V plane], one block of one layer contiguous, where a K plane is
//                   [block_size / 16][d / 2][16 keys][2] and a V plane [d / 16][block_size / 2][16 dims][2],
//                   d = head_dim padded to a multiple of 32: both are packed matrices for their products.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "sample.h"

namespace loadproof {

using bf16 = std::uint16_t;

constexpr int kLanes = 16;       // columns of a panel
constexpr int kChunk = 32;       // k of one panel chunk: 32 x 16 bf16, 1 KiB
constexpr int kSplitKeys = 512;  // keys reduced together before partial results merge
constexpr int kRowTile = 32;     // rows of one product tile
constexpr int kMaxHeadDim = 512;
constexpr int kMaxTileRows = 64;  // query rows of one attention tile

// A weight as the kernels read it; owned by a Matrix (memory.h).
struct PackedMatrix {
  const bf16* data;
  int columns;   // n: multiple of 16 after padding
  int k_padded;  // multiple of 32
  int panels() const { return columns / kLanes; }
};

struct EmbedArgs {
  PackedMatrix table;  // one column a token
  const std::int32_t* token_ids;
  float scale;
  int hidden;
  float* out;  // [rows, hidden]
};

enum class NormOutput { kBf16, kFloat, kAdd };

struct NormArgs {
  const float* x;  // [rows, width]
  const float* weight;
  float eps;
  float offset;
  int width;
  NormOutput output;
  bf16* out_bf16;  // [rows, out_stride]
  int out_stride;
  float* out;  // [rows, width]: written, or added to
  // Row r of the output is row `gather[r]` of x; null for the same row.
  const std::int32_t* gather;
};

enum class Epilogue { kStore, kAdd, kGated, kSoftcap };
enum class Gate { kSilu, kGelu, kGeluTanh };

struct LinearArgs {
  const bf16* a;  // [rows, a_stride]
  int a_stride;
  PackedMatrix weight;
  const float* bias;  // [columns] or null
  Epilogue epilogue;
  Gate gate;        // kGated: even panels are gates, odd panels the matching up projections
  float softcap;    // kSoftcap
  float* out;       // [rows, out_columns]
  int out_columns;  // columns that exist: the matrix may be padded beyond them
  int out_stride;
  bf16* out_bf16;  // kGated: [rows, out_stride]
  // Few rows: weights come from memory once. What is read after this call's panels, so that memory never
  // rests; null for many rows, whose weights are in cache.
  const bf16* next;
};

// The cache of one layer; owned by the plan.
struct CacheView {
  bf16* data;
  std::size_t block_stride;  // elements between blocks
  std::size_t plane;         // elements of one K or V plane: block_size * head_padded
  int block_size;
  int head_padded;
};

// Rows of the step by sequence; owned by the caller for the step.
struct BatchView {
  const std::int32_t* query_starts;  // [num_seqs + 1]
  const std::int32_t* seq_lens;      // [num_seqs]
  const std::int32_t* block_tables;  // [num_seqs, max_blocks]
  const std::int32_t* row_seq;       // [rows]
  const std::int32_t* positions;     // [rows]
  int max_blocks;
  int row_offset;  // rows of the step before the first row of row_seq and positions
};

struct QkvArgs {
  const float* qkv;  // [rows, (num_heads + 2 num_kv_heads) * head_dim]
  int qkv_stride;
  int num_heads, num_kv_heads, head_dim;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  float norm_eps, norm_offset;
  const float* cos;  // [positions, head_dim / 2] or null for none
  const float* sin;
  bf16* q;  // [rows, num_heads * head_padded]
  CacheView cache;
};

struct AttentionArgs {
  const bf16* q;  // [rows, num_heads * head_padded]
  CacheView cache;
  int num_heads, num_kv_heads, head_dim;
  float scale;
  float softcap;  // 0: none
  int window;     // 0: none
  bf16* out;      // [rows, out_stride]: num_heads * head_dim, then zeros
  int out_stride;
};

// A thread's scratch, sized by scratch_bytes().
struct Scratch {
  std::byte* bytes;
};

struct Kernels {
  const char* name;
  void (*begin_thread)();  // once per thread and step, before any other
  void (*end_thread)();
  void (*embed)(const EmbedArgs&, int row_begin, int row_end);
  void (*norm)(const NormArgs&, int row_begin, int row_end);
  void (*linear)(const LinearArgs&, int row_begin, int row_end, int panel_begin, int panel_end, Scratch);
  // Norms, rotates and stores heads of kv groups [group_begin, group_end): their queries, key and value.
  void (*qkv)(const QkvArgs&, const BatchView&, int row_begin, int row_end, int group_begin, int group_end);
  void (*attention)(const AttentionArgs&, const BatchView&, int row_begin, int row_end, int group_begin,
                    int group_end, Scratch);
  void (*sample_row)(const float* logits, int vocab_size, const SampleParams&, const SampleScratch&,
                     SampleResult*);
  // Log-probabilities of `result->token` and of the `num_logprobs` best.
  void (*score_row)(const float* logits, int vocab_size, int num_logprobs, LogprobsMode, const SampleScratch&,
                    SampleResult*);
};

// Bytes of a thread's scratch for heads of padded size `head_padded` in groups of `group` query heads.
std::size_t scratch_bytes(int head_padded, int group);

// Rows of one attention tile: at least one token's whole group.
constexpr int attention_tile_rows(int group) { return group > kMaxTileRows ? group : kMaxTileRows; }

// The table of a level by name (amx, avx512_bf16, avx512, avx2, portable); null where the level is unknown
// or this machine or build lacks it.
const Kernels* kernels_for(std::string_view level);

// Names of the levels that this machine can run, best first; ends with null.
const char* const* available_levels();

}  // namespace loadproof
