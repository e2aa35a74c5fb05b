// What a forked child does with what it has copied from its parent: nothing. The threads that
// worked on it are not there, so its mutexes may be locked for ever and its condition variables
// have waiters that never come; what is shared is the parent's.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace phalanx {

// Changed only in a child, by the fork itself, before it has a second thread.
inline constinit std::atomic<uint32_t> fork_count{0};

// How many forks lie between this process and the one that loaded the library.
inline uint32_t fork_generation() { return fork_count.load(std::memory_order_relaxed); }

// Have a function called in every forked child, in the order of registration. It may take no lock
// that the parent's threads take.
bool after_fork_in_child(void (*handler)());

// Keep the memory of an object that a child will neither use nor destroy.
void leave_alone(void* object);

// Remembers the process that it was made in.
class Origin {
 public:
  bool is_here() const { return generation_ == fork_generation(); }

 private:
  uint32_t generation_ = fork_generation();
};

// Destroys an object in the process that made it; a forked child leaves it alone.
class DeleteHere {
 public:
  template <class T>
  void operator()(T* object) const {
    if (origin_.is_here())
      delete object;
    else
      leave_alone(object);
  }

 private:
  Origin origin_;
};

template <class T, class... Args>
std::shared_ptr<T> make_here(Args&&... args) {
  return {new T(std::forward<Args>(args)...), DeleteHere()};
}

// A T for each process: a forked child makes its own when it first asks.
template <class T>
class PerProcess {
 public:
  PerProcess() : own_(new Own([](T*) { return T(); }, nullptr)) {}
  ~PerProcess() {
    Own* own = own_.load(std::memory_order_relaxed);
    own->origin.is_here() ? delete own : leave_alone(own);
  }
  PerProcess(const PerProcess&) = delete;

  T& here() {
    return here([](T*) { return T(); });
  }
  // `make` makes the child's from its parent's, of which it may take no lock.
  template <class Make>
  T& here(Make&& make) {
    Own* own = own_.load(std::memory_order_acquire);
    if (own->origin.is_here()) return own->value;
    auto fresh = std::make_unique<Own>(make, &own->value);
    Own* parents = own;
    // Of several threads of the child, the first one's is used; acquire for the others.
    if (!own_.compare_exchange_strong(own, fresh.get(), std::memory_order_acq_rel))
      return own->value;
    leave_alone(parents);
    return fresh.release()->value;
  }

 private:
  struct Own {
    template <class Make>
    Own(Make&& make, T* parents) : value(make(parents)) {}
    Origin origin;
    T value;
  };
  std::atomic<Own*> own_;
};

}  // namespace phalanx
