// Memory on large pages, and weights packed for the kernels.
#pragma once

#include <cstddef>
#include <span>

#include "kernels.h"

namespace loadproof {

// Zeroed memory aligned to 2 MiB, on large pages where the system gives them. Owned; moves, never copies.
class HugeBuffer {
 public:
  HugeBuffer() = default;
  explicit HugeBuffer(std::size_t bytes);  // throws std::bad_alloc
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& other) noexcept;
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;

  std::size_t size() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A packed matrix and its memory; filled once, column by column, then only read.
class Matrix {
 public:
  // `columns` outputs of `k` inputs each; columns beyond those that are packed stay zero.
  Matrix(int columns, int k);

  // Rows of a row-major [rows, k] bf16 array become columns. Row r goes to panel
  // ((first + r) / 16) * panel_step + panel_offset, lane (first + r) % 16: a step of 2 interleaves gates with
  // ups. Throws std::invalid_argument where it would not fit.
  void pack(std::span<const bf16> rows_data, int rows, int first, int panel_step, int panel_offset);

  PackedMatrix view() const { return {buffer_.as<bf16>(), columns_padded_, k_padded_}; }
  int k() const { return k_; }

 private:
  int columns_padded_, k_, k_padded_;
  HugeBuffer buffer_;
};

}  // namespace loadproof
