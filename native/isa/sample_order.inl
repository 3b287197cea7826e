// The order of a row's tokens, logits descending and ties to the lowest id, without sorting the vocabulary:
// a row's block maxima tell which few tokens can be among the best. See sample.inl.

namespace loadproof::LOADPROOF_NS {
namespace {
namespace sampling {

using Key = std::uint64_t;

constexpr int kBlock = 256;
constexpr float kLargest = __FLT_MAX__;

inline int smaller(int a, int b) { return a < b ? a : b; }

// A row as it is read: `maxima` [num_blocks, 16] holds the largest logit of each block, lane by lane.
struct Row {
  const float* logits;
  int size;
  int num_blocks;
  float* maxima;
  float best;
};

// The scratch, cut into its parts.
struct Workspace {
  float* adjusted;  // [size]
  float* weights;   // [size], by token id
  float* maxima;    // [num_blocks, 16]
  float* folded;    // [num_blocks, 16]
  float* sums;      // [num_blocks]
  Key* keys;        // [size rounded up to 16]
  Key* spare;       // [size rounded up to 16]
};

inline Workspace divide(const SampleScratch& scratch, int size) {
  const int blocks = (size + kBlock - 1) / kBlock;
  float* per_block = scratch.floats + 2 * static_cast<std::ptrdiff_t>(size);
  return {scratch.floats,
          scratch.floats + size,
          per_block,
          per_block + 16 * blocks,
          per_block + 32 * blocks,
          scratch.keys,
          scratch.keys + (size + 15) / 16 * 16};
}

inline F16 usable(F16 x) { return min(max(x, set1(-kInf)), set1(kLargest)); }
inline float usable(float x) { return x > -kInf ? (x < kLargest ? x : kLargest) : -kInf; }

// Calls f(i, n, x) for each vector of a block: its n tokens from id i on, minus infinity beyond them.
template <class F>
inline void for_block(const Row& row, int block, F f) {
  const int begin = block * kBlock;
  for_lanes(smaller(kBlock, row.size - begin),
            [&](int i, int n) { f(begin + i, n, usable(load_n(row.logits + begin + i, n, -kInf))); });
}

Row scan(const float* logits, int size, float* maxima) {
  Row row = {logits, size, (size + kBlock - 1) / kBlock, maxima, -kInf};
  F16 best = set1(-kInf);
  for (int block = 0; block < row.num_blocks; ++block) {
    F16 most = set1(-kInf);
    for_block(row, block, [&](int, int, F16 x) { most = max(x, most); });
    store(maxima + block * 16, most);
    best = max(most, best);
  }
  row.best = max_lane(best);
  return row;
}

// The lowest id with the largest logit.
int first_best(const Row& row) {
  const F16 best = set1(row.best);
  int block = 0;
  while (!equal_bits(load(row.maxima + block * 16), best)) ++block;
  int found = -1;
  for_block(row, block, [&](int i, int, F16 x) {
    const unsigned bits = equal_bits(x, best);
    if (found < 0 && bits) found = i + __builtin_ctz(bits);
  });
  return found;
}

// ---- The order: keys ascend as logits descend, then as ids ascend

inline Key key_of(float x, int id) {
  const float y = x + 0.0f;  // minus zero ties with zero
  std::uint32_t u;
  __builtin_memcpy(&u, &y, 4);
  const std::uint32_t falling = u >> 31 ? u : u ^ 0x7fffffffu;
  return static_cast<Key>(falling) << 32 | static_cast<std::uint32_t>(id);
}

inline int id_of(Key key) { return static_cast<int>(static_cast<std::uint32_t>(key)); }

// Sorts keys whose ids already ascend: by the bytes of the logit, lowest first, each pass stable. The result
// lies in either array.
Key* sort(Key* keys, int n, Key* spare) {
  std::uint32_t counts[4][256] = {};
  const auto digit = [](Key key, int byte) { return key >> (32 + 8 * byte) & 255u; };
  for (int i = 0; i < n; ++i)
    for (int byte = 0; byte < 4; ++byte) ++counts[byte][digit(keys[i], byte)];
  for (int byte = 0; byte < 4 && n > 1; ++byte) {
    std::uint32_t* place = counts[byte];
    if (place[digit(keys[0], byte)] == static_cast<std::uint32_t>(n)) continue;
    std::uint32_t next = 0;
    for (int value = 0; value < 256; ++value) {
      const std::uint32_t here = place[value];
      place[value] = next;
      next += here;
    }
    for (int i = 0; i < n; ++i) spare[place[digit(keys[i], byte)]++] = keys[i];
    Key* const sorted = spare;
    spare = keys;
    keys = sorted;
  }
  return keys;
}

// Keys of the tokens with low <= logit < high, by id.
int gather(const Row& row, float low, float high, Key* keys) {
  const F16 bottom = set1(low), top = set1(high);
  int count = 0;
  for (int block = 0; block < row.num_blocks; ++block) {
    if (less_bits(load(row.maxima + block * 16), bottom) == 0xffffu) continue;
    for_block(row, block, [&](int i, int n, F16 x) {
      unsigned bits = ~less_bits(x, bottom) & less_bits(x, top) & ((1u << n) - 1u);
      for (; bits; bits &= bits - 1) {
        const int id = i + __builtin_ctz(bits);
        keys[count++] = key_of(usable(row.logits[id]), id);
      }
    });
  }
  return count;
}

// A logit that at least k tokens reach: the kth largest of the maxima of disjoint groups, some 4 k of them,
// so that few more than k reach it.
float reached_by(const Row& row, int k, const Workspace& work) {
  const int vectors = smaller(row.num_blocks, (k + 3) / 4);
  if (vectors * 16 < k) return -kInf;
  for (int v = 0; v < vectors; ++v) store(work.folded + v * 16, load(row.maxima + v * 16));
  for (int block = vectors; block < row.num_blocks; ++block) {
    float* group = work.folded + block % vectors * 16;
    store(group, max(load(group), load(row.maxima + block * 16)));
  }
  for (int i = 0; i < vectors * 16; ++i) work.keys[i] = key_of(work.folded[i], i);
  return work.folded[id_of(sort(work.keys, vectors * 16, work.spare)[k - 1])];
}

// The k best tokens in order, 0 < k <= size.
const Key* best_tokens(const Row& row, int k, const Workspace& work) {
  const int count = gather(row, reached_by(row, k, work), kInf, work.keys);
  return sort(work.keys, count, work.spare);
}

}  // namespace sampling
}  // namespace
}  // namespace loadproof::LOADPROOF_NS
