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

constexpr int kMaxHeadDim = 512;

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
  t.scores = reinterpret_cast<float*>(take(rows * kSplitKeys * 4));
  t.probs = reinterpret_cast<bf16*>(take(rows * kSplitKeys * 2));
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
  int group;
  const bf16* keys(int position) const {  // the 16-key panel that starts at `position`
    const bf16* planes = block(position);
    return planes + position % cache.block_size / kLanes * cache.head_padded * kLanes;
  }
  const bf16* values(int position) const {  // first dim panel, from key `position` on
    return block(position) + cache.plane + position % cache.block_size * kLanes;
  }
  const bf16* block(int position) const {
    const auto number = static_cast<std::size_t>(blocks[position / cache.block_size]);
    return cache.data + number * cache.block_stride + static_cast<std::size_t>(group) * 2 * cache.plane;
  }
};

void score_keys(const Tile& tile, const KeyValues& kv, KeyRange keys) {
  const int dp = kv.cache.head_padded;
  const int step = kv.cache.block_size < kChunk ? kLanes : kChunk;
  for (int k = keys.begin; k < keys.end; k += step) {
    const bf16* panel = kv.keys(k);
    const auto chunk = [=](int kc) { return panel + kc * kChunk * kLanes; };
    product(tile.q, dp, tile.rows, dp / kChunk, chunk, static_cast<std::ptrdiff_t>(dp) * kLanes,
            step / kLanes, tile.scores + (k - keys.begin), kSplitKeys, 0);
  }
}

// Scores of one row to probabilities; sees keys low..high only.
void soften(const AttentionArgs& args, const Tile& tile, int row, KeyRange keys, int low, int high) {
  float* s = tile.scores + static_cast<std::ptrdiff_t>(row) * kSplitKeys;
  bf16* p = tile.probs + static_cast<std::ptrdiff_t>(row) * kSplitKeys;
  const int n = keys.end - keys.begin;
  const F16 scale = set1(args.scale), minus_inf = set1(-kInf);
  const F16 first = set1(static_cast<float>(low)), last = set1(static_cast<float>(high));
  F16 top = minus_inf;
  for (int i = 0; i < n; i += 16) {
    F16 v = load(s + i) * scale;
    if (args.softcap > 0) v = set1(args.softcap) * tanh(v * set1(1.0f / args.softcap));
    const int key = keys.begin + i;
    if (key < low || key + 15 > high) {
      const F16 k = set1(static_cast<float>(key)) + iota();
      v = if_less(k, first, minus_inf, if_less(last, k, minus_inf, v));
    }
    top = max(top, v);
    store(s + i, v);
  }
  const float m = max_lane(top);
  const F16 shift = set1(m == -kInf ? 0.0f : m);
  F16 total = zero();
  for (int i = 0; i < n; i += 16) {
    const F16 e = exp(load(s + i) - shift);
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
  product(
      tile.probs, kSplitKeys, tile.rows, chunks, [&](int kc) { return at[kc]; }, panel_stride, dp / kLanes,
      tile.part, dp, 0);
}

// Folds a split's part into what was merged before it: both scaled to their common maximum.
void merge_row(const Tile& tile, int row, int head_padded, bool first) {
  float* sums = tile.sum + static_cast<std::ptrdiff_t>(row) * head_padded;
  const float* part = tile.part + static_cast<std::ptrdiff_t>(row) * head_padded;
  if (first) {
    tile.max[row] = -kInf;
    tile.total[row] = 0.0f;
    for (int i = 0; i < head_padded; i += 16) store(sums + i, zero());
  }
  if (tile.part_max[row] == -kInf) return;
  const float top = tile.max[row] > tile.part_max[row] ? tile.max[row] : tile.part_max[row];
  alignas(64) float scales[16] = {tile.max[row] - top, tile.part_max[row] - top};
  store(scales, exp(load(scales)));
  const F16 old_scale = set1(scales[0]), new_scale = set1(scales[1]);
  for (int i = 0; i < head_padded; i += 16)
    store(sums + i, load(sums + i) * old_scale + load(part + i) * new_scale);
  tile.total[row] = tile.total[row] * scales[0] + tile.part_total[row] * scales[1];
  tile.max[row] = top;
}

// Query tokens [row, row + tokens) of one sequence against one kv head.
void attend_tile(const AttentionArgs& args, const BatchView& batch, int row, int tokens, int group_index,
                 Tile tile) {
  const int dp = args.cache.head_padded, d = args.head_dim;
  const int group = args.num_heads / args.num_kv_heads;
  const std::ptrdiff_t seq = batch.row_seq[row];
  const KeyValues kv{args.cache, batch.block_tables + seq * batch.max_blocks, group_index};
  tile.rows = tokens * group;
  for (int t = 0; t < tokens; ++t) {
    const bf16* q =
        args.q + (static_cast<std::ptrdiff_t>(row + t) * args.num_heads + group_index * group) * dp;
    __builtin_memcpy(tile.q + static_cast<std::ptrdiff_t>(t) * group * dp, q,
                     static_cast<std::size_t>(group * dp) * 2);
  }
  const int first = batch.positions[row], last = batch.positions[row + tokens - 1];
  const auto low = [&](int t) { return args.window > 0 && t >= args.window ? t - args.window + 1 : 0; };
  const int begin = low(first) / kChunk * kChunk;
  for (int split = begin / kSplitKeys; split * kSplitKeys <= last; ++split) {
    const int end = (split + 1) * kSplitKeys <= last ? (split + 1) * kSplitKeys : last + 1;
    const KeyRange keys{split * kSplitKeys > begin ? split * kSplitKeys : begin,
                        (end + kChunk - 1) / kChunk * kChunk};
    score_keys(tile, kv, keys);
    for (int r = 0; r < tile.rows; ++r) {
      const int position = batch.positions[row + r / group];
      soften(args, tile, r, keys, low(position), position);
    }
    weigh_values(tile, kv, keys);
    for (int r = 0; r < tile.rows; ++r) merge_row(tile, r, dp, split == begin / kSplitKeys);
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
  for (int g = group_begin; g < group_end; ++g) {
    for (int row = row_begin; row < row_end;) {
      const int seq_end = batch.query_starts[batch.row_seq[row] + 1] - batch.row_offset;
      const int end = seq_end < row_end ? seq_end : row_end;
      const int tokens = end - row < most ? end - row : most;
      attend_tile(args, batch, row, tokens, g, tile);
      row += tokens;
    }
  }
}

}  // namespace
}  // namespace loadproof::LOADPROOF_NS
