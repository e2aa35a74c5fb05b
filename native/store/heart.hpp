// A sign of life: a count in a store that a thread of this process raises from time to time,
// whatever the rest of the process does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "fork.hpp"
#include "store/store.hpp"

namespace phalanx::store {

class Heart {
 public:
  // The store must outlive it. To be made by make_here: a forked child has not the thread.
  Heart(Store& store, std::string key, double interval);
  ~Heart() { stop(); }
  Heart(const Heart&) = delete;

  void stop();
  // Seconds since the store last answered.
  double silence() const;
  // Whether the last attempt failed before its time was up: as when the store's process is gone,
  // and not when it, or its host, is stopped.
  bool refused() const { return refused_; }

 private:
  void beat();

  Store& store_;
  const std::string key_;
  const std::chrono::duration<double> interval_;
  std::atomic<Clock::time_point> answered_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> stopping_ = false, refused_ = false;
  const Origin origin_;
  std::thread thread_;
};

}  // namespace phalanx::store
