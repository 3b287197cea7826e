// Attention over the paged cache. Prefill and decode are this one path; see kernels.h for the layouts.
//
// A query at position t reduces over absolute key positions: splits of kSplitKeys keys, each with its own
// maximum and sum, merged in ascending order. Inside a split products run over 32-key chunks in order and
// sums over sixteen lanes by key position. Keys after t, before the window, or beyond the sequence have
// probability exactly 0 and, since cache memory is always finite, add exact zeros: so it makes no difference
// how many of them a tile happens to span.

namespace loadproof::LOADPROOF_NS {
namespace {

constexpr float kBf16Max = 3.3895314e38f;

// Finite values only enter the cache: a stale row is multiplied by 0, which must give 0.
inline F16 finite(F16 x) { return min(max(x, set1(-kBf16Max)), set1(kBf16Max)); }

// One head normalised (where it has a norm) and rotated, in place; `head` is [head_dim].
inline void prepare_head(const QkvArgs& args, const float* weight, int position, float* head) {
  const int d = args.head_dim;
  if (weight) {
    const F16 scale = inverse_rms(head, d, args.norm_eps);
    for_lanes(d, [&](int i, int n) {
      store_n(head + i, load_n(head + i, n) * scale * (load_n(weight + i, n) + set1(args.norm_offset)), n);
    });
  }
  if (!args.cos) return;
  const int half = d / 2;
  const float* cos = args.cos + static_cast<std::ptrdiff_t>(position) * half;
  const float* sin = args.sin + static_cast<std::ptrdiff_t>(position) * half;
  for_lanes(half, [&](int i, int n) {
    const F16 c = load_n(cos + i, n), s = load_n(sin + i, n);
    const F16 x = load_n(head + i, n), y = load_n(head + half + i, n);
    store_n(head + i, x * c - y * s, n);
    store_n(head + half + i, y * c + x * s, n);
  });
}

inline void round_head(const float* head, int d, bf16* out) {
  for_lanes(d, [&](int i, int n) { store_bf16_first(out + i, finite(load_n(head + i, n)), n); });
}

// Key and value of one head into their cache slot.
inline void store_kv(const CacheView& cache, const bf16* key, const bf16* value, int d, bf16* planes,
                     int slot) {
  const int pairs = (d + 1) / 2;
  bf16* k = planes + slot / kLanes * cache.head_padded * kLanes + slot % kLanes * 2;
  for (int p = 0; p < pairs; ++p) __builtin_memcpy(k + p * 2 * kLanes, key + 2 * p, 4);
  bf16* v = planes + cache.plane + slot / 2 * 2 * kLanes + slot % 2;
  for (int i = 0; i < d; ++i) v[i / kLanes * cache.block_size * kLanes + i % kLanes * 2] = value[i];
}

void qkv(const QkvArgs& args, const BatchView& batch, int row_begin, int row_end, int group_begin,
         int group_end) {
  const int d = args.head_dim, dp = args.cache.head_padded;
  const int group = args.num_heads / args.num_kv_heads;
  alignas(64) float head[kMaxHeadDim];
  alignas(64) bf16 key[kMaxHeadDim + kChunk] = {}, value[kMaxHeadDim + kChunk] = {};
  for (int row = row_begin; row < row_end; ++row) {
    const float* heads = args.qkv + static_cast<std::ptrdiff_t>(row) * args.qkv_stride;
    const int position = batch.positions[row];
    const std::ptrdiff_t seq = batch.row_seq[row];
    const int block = batch.block_tables[seq * batch.max_blocks + position / args.cache.block_size];
    bf16* layer_block = args.cache.data + static_cast<std::size_t>(block) * args.cache.block_stride;
    const auto take = [&](int h) { __builtin_memcpy(head, heads + h * d, static_cast<std::size_t>(d) * 4); };
    for (int g = group_begin; g < group_end; ++g) {
      for (int h = g * group; h < (g + 1) * group; ++h) {
        take(h);
        prepare_head(args, args.q_norm, position, head);
        round_head(head, d, args.q + (static_cast<std::ptrdiff_t>(row) * args.num_heads + h) * dp);
      }
      take(args.num_heads + g);
      prepare_head(args, args.k_norm, position, head);
      round_head(head, d, key);
      round_head(heads + (args.num_heads + args.num_kv_heads + g) * d, d, value);
      bf16* planes = layer_block + static_cast<std::size_t>(g) * 2 * args.cache.plane;
      store_kv(args.cache, key, value, d, planes, position % args.cache.block_size);
    }
  }
}

// Rows of scores and probabilities are an odd number of cache lines apart, so that a tile's rows fall into
// different sets.
constexpr int kScoreStride = kSplitKeys + 16;
constexpr int kProbStride = kSplitKeys + 32;

// A thread's scratch for one tile of query rows.
struct Tile {
  int rows;       // query rows in use
  bf16* q;        // [rows32, head_padded]
  float* scores;  // [rows32, kSplitKeys]
  bf16* probs;    // [rows32, kSplitKeys]
  float* part;    // [rows32, head_padded]: one split's weighted values
  float* sum;     // [rows32, head_padded]: merged so far
  float* part_max;
  float* part_total;  // [rows32] each
  float* max;
  float* total;
  bf16* values;  // [kSplitKeys / 32, head_padded / 16, 512]: chunks gathered from blocks of 16 keys
};

Tile carve(Scratch scratch, int head_padded, int group) {
  const std::size_t rows = static_cast<std::size_t>((attention_tile_rows(group) + 31) / 32 * 32);
  const std::size_t dp = static_cast<std::size_t>(head_padded);
  std::byte* at = scratch.bytes;
  const auto take = [&](std::size_t bytes) {
    std::byte* p = at;
    at += (bytes + 63) / 64 * 64;
    return p;
  };
  Tile t{};
  t.q = reinterpret_cast<bf16*>(take(rows * dp * 2));
  t.scores = reinterpret_cast<float*>(take(rows * kScoreStride * 4));
  t.probs = reinterpret_cast<bf16*>(take(rows * kProbStride * 2));
  t.part = reinterpret_cast<float*>(take(rows * dp * 4));
  t.sum = reinterpret_cast<float*>(take(rows * dp * 4));
  t.part_max = reinterpret_cast<float*>(take(rows * 4));
  t.part_total = reinterpret_cast<float*>(take(rows * 4));
  t.max = reinterpret_cast<float*>(take(rows * 4));
  t.total = reinterpret_cast<float*>(take(rows * 4));
  t.values = reinterpret_cast<bf16*>(take(kSplitKeys * dp * 2));
  return t;
}

// The keys of one split that a tile spans: [begin, end), whole 32-key chunks.
struct KeyRange {
  int begin, end;
};

// Planes of one sequence's blocks for one kv head.
struct KeyValues {
  const CacheView& cache;
  const std::int32_t* blocks;
  int num_blocks;  // that hold the sequence
  int group;
  const bf16* keys(int position) const {  // the 16-key panel that starts at `position`
    const bf16* planes = block(position);
    return planes + position % cache.block_size / kLanes * cache.head_padded * kLanes;
  }
  const bf16* values(int position) const {  // first dim panel, from key `position` on
    return block(position) + cache.plane + position % cache.block_size * kLanes;
  }
  const bf16* block(int position) const {
    // A 32-key chunk may reach past the last block of 16; what it reads there is hidden, so any block does.
    const int index = position / cache.block_size < num_blocks ? position / cache.block_size : num_blocks - 1;
    const auto number = static_cast<std::size_t>(blocks[index]);
    return cache.data + number * cache.block_stride + static_cast<std::size_t>(group) * 2 * cache.plane;
  }
};

// Planes are smaller than the pages that hardware prefetches within, so what is needed next is asked for
// here.
inline void fetch(const bf16* from, int elements) {
  for (int i = 0; i < elements; i += 32) __builtin_prefetch(from + i, 0, 2);
}

inline void fetch_keys(const KeyValues& kv, int begin, int end) {
  for (int k = begin; k < end; k += kLanes) fetch(kv.keys(k), kv.cache.head_padded * kLanes);
}

inline void fetch_values(const KeyValues& kv, int begin, int end) {
  const int step = kv.cache.block_size < kChunk ? kLanes : kChunk;
  for (int k = begin; k < end; k += step)
    for (int j = 0; j < kv.cache.head_padded / kLanes; ++j)
      fetch(kv.values(k) + static_cast<std::ptrdiff_t>(j) * kv.cache.block_size * kLanes, step * kLanes);
}

constexpr int kKeysAhead = 96;  // keys are asked for this many before they are needed

// `fetching`: a decoding row, which reads its keys and values from memory. Values arrive meanwhile.
void score_keys(const Tile& tile, const KeyValues& kv, KeyRange keys, bool fetching) {
  const int dp = kv.cache.head_padded;
  const int step = kv.cache.block_size < kChunk ? kLanes : kChunk;
  for (int k = keys.begin; k < keys.end; k += step) {
    if (fetching) {
      fetch_values(kv, k, k + step);
      if (k + kKeysAhead < keys.end) fetch_keys(kv, k + kKeysAhead, k + kKeysAhead + step);
    }
    const bf16* panel = kv.keys(k);
    const auto chunk = [=](int kc) { return panel + kc * kChunk * kLanes; };
    product(tile.q, dp, tile.rows, dp / kChunk, chunk, static_cast<std::ptrdiff_t>(dp) * kLanes,
            step / kLanes, tile.scores + (k - keys.begin), kScoreStride, {});
  }
}

// Powers of two are cheaper than powers of e: 2**(score * scale * log2 e) is the same probability.
constexpr float kLog2E = 1.44269504f;

// Scores of one row become probabilities; the row sees keys low..high only.
void soften(const AttentionArgs& args, const Tile& tile, int row, KeyRange keys, int low, int high) {
  float* s = tile.scores + static_cast<std::ptrdiff_t>(row) * kScoreStride;
  bf16* p = tile.probs + static_cast<std::ptrdiff_t>(row) * kProbStride;
  const int n = keys.end - keys.begin;
  float scale = args.scale * kLog2E;
  if (args.softcap > 0) {
    for (int i = 0; i < n; i += 16)
      store(s + i, set1(args.softcap) * tanh(load(s + i) * set1(args.scale / args.softcap)));
    scale = kLog2E;
  }
  // Keys that the row does not see stand at the ends of the range.
  const auto hide = [&](int i) {
    const F16 k = set1(static_cast<float>(keys.begin + i)) + iota();
    const F16 hidden = set1(-kInf), first = set1(static_cast<float>(low)),
              last = set1(static_cast<float>(high));
    store(s + i, if_less(k, first, hidden, if_less(last, k, hidden, load(s + i))));
  };
  const int clear_begin = low > keys.begin ? (low - keys.begin + 15) / 16 * 16 : 0;
  const int clear_end =
      high + 1 < keys.end ? (high + 1 > keys.begin ? (high + 1 - keys.begin) / 16 * 16 : 0) : n;
  for (int i = 0; i < (clear_begin < n ? clear_begin : n); i += 16) hide(i);
  for (int i = clear_end; i < n; i += 16) hide(i);
  F16 top = set1(-kInf);
  // A NaN score gives way, whatever follows it: max returns its second operand where one is NaN.
  for (int i = 0; i < n; i += 16) top = max(load(s + i), top);
  const float m = max_lane(top) * scale;  // minus infinity where the row sees none of these keys
  const F16 shift = set1(m == -kInf ? 0.0f : -m), factor = set1(scale);
  F16 total = zero();
  for (int i = 0; i < n; i += 16) {
    const F16 e = exp2_below(mul_add(load(s + i), factor, shift));
    total = total + e;
    store_bf16(p + i, e);
  }
  tile.part_max[row] = m;
  tile.part_total[row] = sum(total);
}

void weigh_values(const Tile& tile, const KeyValues& kv, KeyRange keys) {
  const int dp = kv.cache.head_padded, bs = kv.cache.block_size;
  const int chunks = (keys.end - keys.begin) / kChunk;
  const bf16* at[kSplitKeys / kChunk];
  std::ptrdiff_t panel_stride = static_cast<std::ptrdiff_t>(bs) * kLanes;
  for (int c = 0; c < chunks; ++c) at[c] = kv.values(keys.begin + c * kChunk);
  if (bs < kChunk) {  // a chunk spans two blocks: join their halves
    constexpr int half = kChunk / 2 * kLanes;
    for (int c = 0; c < chunks; ++c) {
      const bf16* second = kv.values(keys.begin + c * kChunk + kLanes);
      bf16* to = tile.values + static_cast<std::ptrdiff_t>(c) * dp * kChunk;
      for (int j = 0; j < dp / kLanes; ++j) {
        __builtin_memcpy(to + j * 2 * half, at[c] + j * panel_stride, half * 2);
        __builtin_memcpy(to + j * 2 * half + half, second + j * panel_stride, half * 2);
      }
      at[c] = to;
    }
    panel_stride = kChunk * kLanes;
  }
  product(tile.probs, kProbStride, tile.rows, chunks, [&](int kc) { return at[kc]; }, panel_stride,
          dp / kLanes, tile.part, dp, {});
}

// Folds a split's parts into what was merged before: both scaled to their common maximum. The scales of
// sixteen rows are computed at once.
void merge_split(const Tile& tile, int head_padded, bool first) {
  alignas(64) float old_scales[16], new_scales[16];
  for (int r0 = 0; r0 < tile.rows; r0 += 16) {
    const F16 none = set1(-kInf);
    const F16 old_max = first ? none : load(tile.max + r0), part_max = load(tile.part_max + r0);
    const F16 top = max(old_max, part_max);
    const F16 base = if_less(none, top, top, zero());  // rows that have seen no key yet: any finite base
    const F16 old_scale = exp2_below(old_max - base), new_scale = exp2_below(part_max - base);
    const F16 old_total = first ? zero() : load(tile.total + r0);
    store(tile.max + r0, top);
    store(tile.total + r0, old_total * old_scale + load(tile.part_total + r0) * new_scale);
    store(old_scales, old_scale);
    store(new_scales, new_scale);
    for (int r = r0; r < tile.rows && r < r0 + 16; ++r) {
      float* sums = tile.sum + static_cast<std::ptrdiff_t>(r) * head_padded;
      const float* part = tile.part + static_cast<std::ptrdiff_t>(r) * head_padded;
      const F16 ours = set1(new_scales[r - r0]), theirs = set1(old_scales[r - r0]);
      if (first) {
        for (int i = 0; i < head_padded; i += 16) store(sums + i, load(part + i) * ours);
      } else {
        for (int i = 0; i < head_padded; i += 16)
          store(sums + i, load(sums + i) * theirs + load(part + i) * ours);
      }
    }
  }
}

// The first key that a query at position t sees.
inline int low_key(const AttentionArgs& args, int t) {
  return args.window > 0 && t >= args.window ? t - args.window + 1 : 0;
}

// Keys of split `split` that queries at positions first..last see between them, in whole chunks.
inline KeyRange split_keys(const AttentionArgs& args, int split, int first, int last) {
  const int begin = low_key(args, first) / kChunk * kChunk, start = split * kSplitKeys;
  const int end = start + kSplitKeys <= last ? start + kSplitKeys : last + 1;
  return {start > begin ? start : begin, (end + kChunk - 1) / kChunk * kChunk};
}

// Copies the queries of one kv head's group into the tile, a row a head, token by token.
inline void gather_queries(const AttentionArgs& args, int row, int tokens, int group_index,
                           const Tile& tile) {
  const std::ptrdiff_t dp = args.cache.head_padded, group = args.num_heads / args.num_kv_heads;
  for (int t = 0; t < tokens; ++t) {
    const bf16* q =
        args.q + (static_cast<std::ptrdiff_t>(row + t) * args.num_heads + group_index * group) * dp;
    __builtin_memcpy(tile.q + t * group * dp, q, static_cast<std::size_t>(group * dp) * 2);
  }
}

// Query tokens [row, row + tokens) of one sequence against one kv head.
void attend_tile(const AttentionArgs& args, const BatchView& batch, int row, int tokens, int group_index,
                 Tile tile) {
  const int dp = args.cache.head_padded, d = args.head_dim;
  const int group = args.num_heads / args.num_kv_heads;
  const std::ptrdiff_t seq = batch.row_seq[row];
  const int num_blocks = (batch.seq_lens[seq] + args.cache.block_size - 1) / args.cache.block_size;
  const KeyValues kv{args.cache, batch.block_tables + seq * batch.max_blocks, num_blocks, group_index};
  tile.rows = tokens * group;
  const FewRows few(tile.rows);
  gather_queries(args, row, tokens, group_index, tile);
  const int first = batch.positions[row], last = batch.positions[row + tokens - 1];
  const int first_split = low_key(args, first) / kSplitKeys;
  for (int split = first_split; split * kSplitKeys <= last; ++split) {
    const KeyRange keys = split_keys(args, split, first, last);
    score_keys(tile, kv, keys, tokens == 1);
    for (int r = 0; r < tile.rows; ++r) {
      const int position = batch.positions[row + r / group];
      soften(args, tile, r, keys, low_key(args, position), position);
    }
    weigh_values(tile, kv, keys);
    merge_split(tile, dp, split == first_split);
  }
  for (int r = 0; r < tile.rows; ++r) {
    bf16* out = args.out + static_cast<std::ptrdiff_t>(row + r / group) * args.out_stride +
                (group_index * group + r % group) * d;
    const float* sums = tile.sum + static_cast<std::ptrdiff_t>(r) * dp;
    const F16 inverse = set1(1.0f / tile.total[r]);
    // Adding zero makes every zero positive, whatever signs the masked products had.
    for_lanes(d, [&](int i, int n) { store_bf16_first(out + i, load(sums + i) * inverse + zero(), n); });
  }
}

void attention(const AttentionArgs& args, const BatchView& batch, int row_begin, int row_end, int group_begin,
               int group_end, Scratch scratch) {
  const int group = args.num_heads / args.num_kv_heads;
  const int most = attention_tile_rows(group) / group;
  const Tile tile = carve(scratch, args.cache.head_padded, group);
  for (int row = row_begin; row < row_end;) {
    const int seq_end = batch.query_starts[batch.row_seq[row] + 1] - batch.row_offset;
    const int end = seq_end < row_end ? seq_end : row_end;
    for (int g = group_begin; g < group_end; ++g)
      for (int first = row; first < end; first += most)
        attend_tile(args, batch, first, end - first < most ? end - first : most, g, tile);
    row = end;
  }
}

}  // namespace
}  // namespace loadproof::LOADPROOF_NS
