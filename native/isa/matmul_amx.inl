// Products on AMX tiles: C = A B for bf16 rows and packed panels, in float.
//
// A tile instruction adds 32 k at once: even members of the pairs in one chain, odd ones in another, then
// their sum to the accumulator. Chunks follow in ascending order, so an output element sees the same
// additions in every tile shape. Rows of a tile do not touch each other: rows beyond `rows` may hold
// anything, but must be readable up to a multiple of 16 (but see FewRows).

namespace loadproof::LOADPROOF_NS {
namespace {

constexpr int kTileRows = 16;

struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// By the rows of tiles 0..4, which accumulate and hold A where there is one row tile: [rows - 1]. Static,
// since GCC 12 believes that the instruction reads only the first eight bytes.
struct TileConfigs {
  TileConfig of[kTileRows];
  constexpr TileConfigs() : of{} {
    for (int n = 1; n <= kTileRows; ++n)
      for (int tile = 0; tile <= 4; ++tile) of[n - 1].rows[tile] = static_cast<std::uint8_t>(n);
  }
};
inline constexpr TileConfigs kTileConfigs;

inline void begin_thread() { _tile_loadconfig(&kTileConfigs.of[kTileRows - 1]); }

// While it lives, products are of `rows` rows at most (at least 1), and only those are read, multiplied and
// written, if they are fewer than 16: the same additions in a fraction of the time. A decoding token's
// attention has as few rows as heads share its keys.
class FewRows {
 public:
  explicit FewRows(int rows) : few_(rows < kTileRows) {
    assert(rows >= 1);
    if (few_) _tile_loadconfig(&kTileConfigs.of[rows - 1]);
  }
  ~FewRows() {
    if (few_) begin_thread();
  }
  FewRows(const FewRows&) = delete;
  FewRows& operator=(const FewRows&) = delete;

 private:
  const bool few_;
};

inline void end_thread() { _tile_release(); }

// Asks for the N chunks that follow each other at `kc`.
template <int N>
inline void fetch_chunks(const Fetch& fetch, int kc) {
  if (!fetch.from || kc % fetch.every != fetch.phase) return;
  const bf16* at = fetch.from + static_cast<std::ptrdiff_t>(kc) * N * kChunk * kLanes;
  for (int line = 0; line < 16 * N; ++line) __builtin_prefetch(at + line * 32, 0, 2);
}

// The same for panels from the j-th on.
inline Fetch from_panel(const Fetch& fetch, int j, int chunks) {
  if (!fetch.from) return fetch;
  return {fetch.from + static_cast<std::ptrdiff_t>(j) * chunks * kChunk * kLanes, fetch.every, fetch.phase};
}

// Tiles 0..3 accumulate, 4 and 5 hold A, 6 and 7 hold B. A streams past, while the panels stay in the first
// cache for the next rows.
template <class ChunkOf>
inline void tile_2x2(const bf16* a, int a_stride, int chunks, ChunkOf chunk, std::ptrdiff_t panel_stride,
                     float* c, int c_stride, Fetch fetch) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const std::size_t sa = sizeof(bf16) * static_cast<std::size_t>(a_stride);
  const bf16* a1 = a + 16 * a_stride;
  for (int kc = 0; kc < chunks; ++kc) {
    const bf16* b = chunk(kc);
    fetch_chunks<2>(fetch, kc);
    _tile_loadd(6, b, 64);
    _tile_stream_loadd(4, a + kc * kChunk, sa);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + panel_stride, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_stream_loadd(5, a1 + kc * kChunk, sa);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  const std::size_t sc = sizeof(float) * static_cast<std::size_t>(c_stride);
  _tile_stored(0, c, sc);
  _tile_stored(1, c + kLanes, sc);
  _tile_stored(2, c + 16 * c_stride, sc);
  _tile_stored(3, c + 16 * c_stride + kLanes, sc);
}

// One row tile against four panels (fewer: N).
template <int N, class ChunkOf>
inline void tile_1xn(const bf16* a, int a_stride, int chunks, ChunkOf chunk, std::ptrdiff_t panel_stride,
                     float* c, int c_stride, Fetch fetch) {
  _tile_zero(0);
  if constexpr (N > 1) _tile_zero(1);
  if constexpr (N > 2) _tile_zero(2);
  if constexpr (N > 3) _tile_zero(3);
  const std::size_t sa = sizeof(bf16) * static_cast<std::size_t>(a_stride);
  for (int kc = 0; kc < chunks; ++kc) {
    const bf16* b = chunk(kc);
    fetch_chunks<N>(fetch, kc);
    _tile_loadd(4, a + kc * kChunk, sa);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N > 1) {
      _tile_loadd(7, b + panel_stride, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (N > 2) {
      _tile_loadd(5, b + 2 * panel_stride, 64);
      _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (N > 3) {
      _tile_loadd(6, b + 3 * panel_stride, 64);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  const std::size_t sc = sizeof(float) * static_cast<std::size_t>(c_stride);
  _tile_stored(0, c, sc);
  if constexpr (N > 1) _tile_stored(1, c + kLanes, sc);
  if constexpr (N > 2) _tile_stored(2, c + 2 * kLanes, sc);
  if constexpr (N > 3) _tile_stored(3, c + 3 * kLanes, sc);
}

// But for FewRows: C [rows rounded up to 16, panels * 16] = A [same rows, chunks * 32] times `panels` panels.
template <class ChunkOf>
inline void product(const bf16* a, int a_stride, int rows, int chunks, ChunkOf chunk,
                    std::ptrdiff_t panel_stride, int panels, float* c, int c_stride, Fetch fetch) {
  int i = 0;
  for (; rows - i > 16; i += 32) {
    const bf16* from = a + i * a_stride;
    float* to = c + i * c_stride;
    int j = 0;
    for (; j + 2 <= panels; j += 2) {
      const auto b = [&](int kc) { return chunk(kc) + j * panel_stride; };
      const Fetch ahead = i == 0 ? from_panel(fetch, j, chunks) : Fetch{};
      tile_2x2(from, a_stride, chunks, b, panel_stride, to + j * kLanes, c_stride, ahead);
    }
    if (j < panels) {
      const auto b = [&](int kc) { return chunk(kc) + j * panel_stride; };
      for (int half = 0; half < 32; half += 16)
        tile_1xn<1>(from + half * a_stride, a_stride, chunks, b, panel_stride,
                    to + half * c_stride + j * kLanes, c_stride, {});
    }
  }
  if (i >= rows) return;
  const bf16* from = a + i * a_stride;
  float* to = c + i * c_stride;
  int j = 0;
  const auto strip = [&](auto n) {
    const auto b = [&](int kc) { return chunk(kc) + j * panel_stride; };
    const Fetch ahead = i == 0 ? from_panel(fetch, j, chunks) : Fetch{};
    tile_1xn<decltype(n)::value>(from, a_stride, chunks, b, panel_stride, to + j * kLanes, c_stride, ahead);
    j += decltype(n)::value;
  };
  while (panels - j >= 4) strip(Int<4>{});
  if (panels - j >= 2) strip(Int<2>{});
  if (panels - j >= 1) strip(Int<1>{});
}

}  // namespace
}  // namespace loadproof::LOADPROOF_NS
