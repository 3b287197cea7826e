#include "matrix.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

namespace loadproof {
namespace {

constexpr std::size_t kPage = std::size_t{2} << 20;

int round_up(int x, int to) { return (x + to - 1) / to * to; }

}  // namespace

HugeBuffer::HugeBuffer(std::size_t bytes) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX - 2 * kPage) throw std::bad_alloc();
  bytes_ = (bytes + kPage - 1) / kPage * kPage;
  // One page more than needed, then the ends are given back: the middle is aligned.
  void* mapped = mmap(nullptr, bytes_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* start = static_cast<std::byte*>(mapped);
  const std::size_t before = (kPage - reinterpret_cast<std::size_t>(start) % kPage) % kPage;
  data_ = start + before;
  if (before > 0) munmap(start, before);
  if (before < kPage) munmap(data_ + bytes_, kPage - before);
#ifdef MADV_HUGEPAGE
  madvise(data_, bytes_, MADV_HUGEPAGE);  // advice: small pages are slower, not wrong
#endif
}

HugeBuffer::~HugeBuffer() {
  if (data_) munmap(data_, bytes_);
}

HugeBuffer::HugeBuffer(HugeBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Matrix::Matrix(int columns, int k)
    : columns_padded_(round_up(columns, kLanes)),
      k_(k),
      k_padded_(round_up(k, kChunk)),
      buffer_(static_cast<std::size_t>(columns_padded_) * static_cast<std::size_t>(k_padded_) *
              sizeof(bf16)) {}

void Matrix::pack(std::span<const bf16> rows_data, int rows, int first, int panel_step, int panel_offset) {
  const auto k = static_cast<std::size_t>(k_);
  if (rows < 1 || first < 0 || panel_step < 1 || panel_offset < 0 ||
      rows_data.size() != k * static_cast<std::size_t>(rows))
    throw std::invalid_argument("pack: rows do not match the data");
  const std::int64_t last = std::int64_t{first} + rows - 1;
  const std::int64_t last_panel = last / kLanes * panel_step + panel_offset;
  if (last_panel >= columns_padded_ / kLanes) throw std::invalid_argument("pack: columns beyond the matrix");
  const std::size_t panel_size = static_cast<std::size_t>(k_padded_) * kLanes;
  for (int r = 0; r < rows;) {
    const int lane = (first + r) % kLanes;
    const int lanes = rows - r < kLanes - lane ? rows - r : kLanes - lane;
    bf16* panel = buffer_.as<bf16>() +
                  static_cast<std::size_t>((first + r) / kLanes * panel_step + panel_offset) * panel_size;
    const bf16* from = rows_data.data() + static_cast<std::size_t>(r) * k;
    for (std::size_t pair = 0; pair < k / 2; ++pair) {
      bf16* to = panel + pair * 2 * kLanes + 2 * lane;
      for (int l = 0; l < lanes; ++l)
        std::memcpy(to + 2 * l, from + static_cast<std::size_t>(l) * k + 2 * pair, 4);
    }
    if (k % 2)
      for (int l = 0; l < lanes; ++l)
        panel[k / 2 * 2 * kLanes + static_cast<std::size_t>(2 * (lane + l))] =
            from[static_cast<std::size_t>(l + 1) * k - 1];
    r += lanes;
  }
}

}  // namespace loadproof
