// The threads of one forward pass: they run the same phases, meet at barriers, and draw work by ticket.
//
// Who computes an element changes none of its bits, so work goes to whoever is free: on a shared machine a fixed
// split waits for the thread whose core is busy with something else.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <memory>

namespace pd {

class Shared {
 public:
  Shared(int num_threads, int num_phases)
      : num_threads_(num_threads), tickets_(std::make_unique<std::atomic<long>[]>(num_phases)) {}

 private:
  friend class Team;
  const int num_threads_;
  std::unique_ptr<std::atomic<long>[]> tickets_;
  alignas(64) std::atomic<int> waiting_{0};
  alignas(64) std::atomic<int> passed_{0};
};

// One thread's view.
class Team {
 public:
  Team(Shared& shared, int rank) : shared_(shared), rank_(rank) {}

  int rank() const { return rank_; }
  int size() const { return shared_.num_threads_; }

  // Ends a phase: nobody goes on before all have come.
  void barrier() {
    ++phase_;
    if (size() == 1) return;
    const int passed = shared_.passed_.load(std::memory_order_relaxed);
    if (shared_.waiting_.fetch_add(1, std::memory_order_acq_rel) == size() - 1) {
      shared_.waiting_.store(0, std::memory_order_relaxed);
      shared_.passed_.store(passed + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; shared_.passed_.load(std::memory_order_acquire) == passed; ++spins) {
      // A core that something else uses must not be spun on: it may be what the last thread waits for.
      spins < 2000 ? _mm_pause() : static_cast<void>(sched_yield());
    }
  }

  // The next piece of this phase's work, counted from 0.
  long ticket() {
    if (size() == 1) return own_ticket_phase_ == phase_ ? ++own_ticket_ : start_own();
    return shared_.tickets_[phase_].fetch_add(1, std::memory_order_relaxed);
  }

 private:
  long start_own() {
    own_ticket_phase_ = phase_;
    return own_ticket_ = 0;
  }

  Shared& shared_;
  const int rank_;
  int phase_ = 0;
  int own_ticket_phase_ = -1;
  long own_ticket_ = 0;
};

}  // namespace pd
