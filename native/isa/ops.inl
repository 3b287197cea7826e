// The row-wise operations and the linear layer, written once over F16 and product(); see kernels.h.

namespace loadproof::LOADPROOF_NS {
namespace {

inline float root(float x) { return __builtin_sqrtf(x); }

void embed(const EmbedArgs& args, int row_begin, int row_end) {
  const std::size_t panel = static_cast<std::size_t>(args.table.k_padded) * kLanes;
  for (int row = row_begin; row < row_end; ++row) {
    const auto token = static_cast<std::size_t>(args.token_ids[row]);
    const bf16* column = args.table.data + token / kLanes * panel + token % kLanes * 2;
    float* out = args.out + static_cast<std::ptrdiff_t>(row) * args.hidden;
    for (int k = 0; k < args.hidden; ++k) {
      const std::uint32_t bits = static_cast<std::uint32_t>(column[k / 2 * 2 * kLanes + k % 2]) << 16;
      float value;
      __builtin_memcpy(&value, &bits, 4);
      out[k] = value * args.scale;
    }
  }
}

// 1 / sqrt(mean square + eps) of one row: squares in sixteen lanes, lanes summed as a tree.
inline F16 inverse_rms(const float* x, int width, float eps) {
  F16 squares = zero();
  for_lanes(width, [&](int i, int n) {
    const F16 v = load_n(x + i, n);
    squares = mul_add(v, v, squares);
  });
  return set1(1.0f / root(sum(squares) / static_cast<float>(width) + eps));
}

void norm(const NormArgs& args, int row_begin, int row_end) {
  const F16 offset = set1(args.offset);
  for (int row = row_begin; row < row_end; ++row) {
    const int from = args.gather ? args.gather[row] : row;
    const float* x = args.x + static_cast<std::ptrdiff_t>(from) * args.width;
    float* out = args.out + static_cast<std::ptrdiff_t>(row) * args.width;
    bf16* out_bf16 = args.out_bf16 + static_cast<std::ptrdiff_t>(row) * args.out_stride;
    const F16 scale = inverse_rms(x, args.width, args.eps);
    for_lanes(args.width, [&](int i, int n) {
      const F16 y = load_n(x + i, n) * scale * (load_n(args.weight + i, n) + offset);
      if (args.output == NormOutput::kBf16) store_bf16_first(out_bf16 + i, y, n);
      if (args.output == NormOutput::kFloat) store_n(out + i, y, n);
      if (args.output == NormOutput::kAdd) store_n(out + i, load_n(out + i, n) + y, n);
    });
  }
}

// x / 2 (1 + erf(x / sqrt 2)), erf by Abramowitz and Stegun 7.1.26 (absolute error below 1.5e-7).
inline F16 gelu(F16 x) {
  const F16 z = max(x, zero() - x) * set1(0.70710678f);
  const F16 t = set1(1.0f) / mul_add(set1(0.3275911f), z, set1(1.0f));
  F16 p = set1(1.061405429f);
  p = mul_add(p, t, set1(-1.453152027f));
  p = mul_add(p, t, set1(1.421413741f));
  p = mul_add(p, t, set1(-0.284496736f));
  p = mul_add(p, t, set1(0.254829592f));
  const F16 tail = p * t * exp(zero() - z * z);  // 1 - erf(|x| / sqrt 2)
  return x * set1(0.5f) * if_less(x, zero(), tail, set1(2.0f) - tail);
}

inline F16 activate(Gate gate, F16 x) {
  switch (gate) {
    case Gate::kSilu:
      return x / (set1(1.0f) + exp(zero() - x));
    case Gate::kGelu:
      return gelu(x);
    case Gate::kGeluTanh:
      break;
  }
  const F16 inner = set1(0.79788456f) * mul_add(set1(0.044715f) * x * x, x, x);
  return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}

// One tile of finished products into the output: `c` is [rows, panels * 16], its first panel is `panel`.
inline void finish_tile(const LinearArgs& args, const float* c, int c_stride, int row, int rows, int panel,
                        int panels) {
  for (int r = 0; r < rows; ++r) {
    const float* from = c + r * c_stride;
    const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(row + r) * args.out_stride;
    if (args.epilogue == Epilogue::kGated) {
      for (int j = 0; j < panels; j += 2) {
        const int column = (panel + j) / 2 * kLanes;
        F16 gate = load(from + j * kLanes);
        F16 up = load(from + (j + 1) * kLanes);
        if (args.bias) {
          gate = gate + load(args.bias + (panel + j) * kLanes);
          up = up + load(args.bias + (panel + j + 1) * kLanes);
        }
        store_bf16(args.out_bf16 + at + column, activate(args.gate, gate) * up);
      }
      continue;
    }
    for (int j = 0; j < panels; ++j) {
      const int column = (panel + j) * kLanes;
      const int n = args.out_columns - column < kLanes ? args.out_columns - column : kLanes;
      if (n <= 0) break;
      F16 y = load(from + j * kLanes);
      if (args.bias) y = y + load(args.bias + column);
      float* out = args.out + at + column;
      if (args.epilogue == Epilogue::kAdd) y = load_n(out, n) + y;
      if (args.epilogue == Epilogue::kSoftcap) y = set1(args.softcap) * tanh(y * set1(1.0f / args.softcap));
      store_n(out, y, n);
    }
  }
}

// Panels of one product call. On AMX a pair stays in the first cache for the next rows.
constexpr int kGroupPanels = LOADPROOF_AMX ? 2 : 4;
constexpr std::ptrdiff_t kFetchAhead = 32768;  // elements: 64 KiB

void linear(const LinearArgs& args, int row_begin, int row_end, int panel_begin, int panel_end,
            Scratch scratch) {
  float* c = reinterpret_cast<float*>(scratch.bytes);
  constexpr int c_stride = kGroupPanels * kLanes;
  const std::ptrdiff_t panel_stride = static_cast<std::ptrdiff_t>(args.weight.k_padded) * kLanes;
  const int chunks = args.weight.k_padded / kChunk;
  const bf16* end = args.weight.data + panel_end * panel_stride;
  const int tiles = (row_end - row_begin + kRowTile - 1) / kRowTile;
  const FewRows few(row_end - row_begin);
  for (int panel = panel_begin; panel < panel_end; panel += kGroupPanels) {
    const int panels = panel_end - panel < kGroupPanels ? panel_end - panel : kGroupPanels;
    const bf16* base = args.weight.data + panel * panel_stride;
    const auto chunk = [=](int kc) { return base + kc * kChunk * kLanes; };
    const bf16* fetch = nullptr;
    if (args.next)
      fetch = end - base > kFetchAhead ? base + kFetchAhead : args.next + (kFetchAhead - (end - base));
    for (int row = row_begin; row < row_end; row += kRowTile) {
      const int rows = row_end - row < kRowTile ? row_end - row : kRowTile;
      const bf16* a = args.a + static_cast<std::ptrdiff_t>(row) * args.a_stride;
      product(a, args.a_stride, rows, chunks, chunk, panel_stride, panels, c, c_stride,
              Fetch{fetch, tiles, (row - row_begin) / kRowTile});
      finish_tile(args, c, c_stride, row, rows, panel, panels);
    }
  }
}

}  // namespace
}  // namespace loadproof::LOADPROOF_NS
