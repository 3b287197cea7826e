// Who computes what of a step that all threads share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cassert>
#include <vector>

#include "layout.h"

namespace loadproof {

// Work is divided into a share for each thread, taken piece by piece from its beginning, so that memory is
// read in order. A thread that is through takes what is left of the others' shares, since it may have more of
// its core than they have of theirs.
class Division {
 public:
  explicit Division(int parts) : parts_(parts), cursors_(2 * size(parts)) { assert(parts >= 1); }

  // Before members are made, by one thread.
  void reset() {
    for (Cursor& cursor : cursors_) cursor.taken.store(0, std::memory_order_relaxed);
  }

  // A thread's part in a row of divided works: every thread runs the same ones, with a barrier after each.
  class Member {
   public:
    Member(Division& division, int thread) : division_(division), thread_(thread) {}
    int thread() const { return thread_; }
    int part() const { return thread_; }  // whose share it begins with
    int parts() const { return division_.parts_; }

    // Calls work(begin, end, share_end) for pieces of `count` items until none is left: at most `grain` items
    // each, of a share that ends at `share_end`. Shares and pieces begin at multiples of `unit`.
    template <class Work>
    void run(int count, int unit, int grain, Work work) {
      assert(grain >= unit && grain % unit == 0);
      const int parts = division_.parts_;
      const unsigned turn = turn_++ % 2;
      // The other set was last used before the last barrier, and is used next after the coming one.
      division_.cursor(1 - turn, thread_).store(0, std::memory_order_relaxed);
      for (int i = 0; i < parts; ++i) {
        const int part = (thread_ + i) % parts;
        const auto [begin, end] = share(count, part, parts, unit);
        std::atomic<int>& taken = division_.cursor(turn, part);
        for (int at; (at = begin + taken.fetch_add(grain, std::memory_order_relaxed)) < end;)
          work(at, std::min(at + grain, end), end);
      }
    }

   private:
    Division& division_;
    const int thread_;
    unsigned turn_ = 0;
  };

 private:
  struct alignas(64) Cursor {
    std::atomic<int> taken{0};  // items of a share that threads have taken, or more
  };
  std::atomic<int>& cursor(unsigned turn, int part) {
    return cursors_[turn * size(parts_) + size(part)].taken;
  }

  const int parts_;
  std::vector<Cursor> cursors_;  // for two works by turns: [2, parts]
};

// A thread that does a whole work by itself, in one piece whatever the grain.
class Alone {
 public:
  explicit Alone(int thread) : thread_(thread) {}
  int thread() const { return thread_; }
  int part() const { return 0; }
  int parts() const { return 1; }
  template <class Work>
  void run(int count, int, int, Work work) const {
    work(0, count, count);
  }

 private:
  const int thread_;
};

}  // namespace loadproof
