// Who is in a world: one record per rank, in memory that all of them share. Groups ask it whether a
// rank still lives, how it ended, and where its heap is.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "layout.hpp"
#include "process.hpp"
#include "region.hpp"

namespace phalanx {

class Roster {
 public:
  // Rank 0 creates, the others open; then each joins, which returns when all are there.
  // Of its ranks `near` are on this host, all by default.
  static std::shared_ptr<Roster> create(int size, bool threads, int near = 0);
  static std::shared_ptr<Roster> open(const std::string& ticket);

  const std::string& ticket() const { return region_->ticket(); }
  uint64_t id() const { return region_->id(); }
  int size() const;
  // The rank, which came from outside of this process or from Python. Throws unless it is one.
  int checked(int rank) const;
  bool threads() const { return region_->threads(); }
  // `pids` are the processes of ranks on this host, 0 where unknown: one that ends before it has
  // joined ends the wait.
  void join(int rank, Deadline deadline, const std::vector<int32_t>& pids = {});
  // Say that a rank is on another host. Before anybody joins.
  void place(int rank, const std::string& host, int pid);

  // Say that this rank is done, or how it failed ("raised an exception: ..."). Seen by waiters at
  // their next look. A forked child does not speak for its parent: there, nothing happens.
  void leave(int rank);
  void fail(int rank, const std::string& why);

  // "" while the rank lives; otherwise one or more lines that say how it ended. `ask_system` also
  // looks for the process, which costs a few microseconds.
  std::string obituary(int rank, bool ask_system) const;
  // Whether its program is about to end after it left: looked at again, it has an exit code.
  bool is_ending(int rank) const;
  int64_t ended_ns(int rank) const;   // when it left or failed; 0 if it did not say so
  std::string title(int rank) const;  // "rank 2 (pid 4711 on host box)"

  // A text that all ranks can read, also while the one that wrote it hangs or after its end. Of a
  // long one the end is kept. Calls for one rank must not overlap.
  void note(int rank, const std::string& text);
  std::vector<std::string> notes() const;  // of all ranks; "" where there is none

  // Address of something in the heap of a rank, at an offset that the rank has told.
  std::byte* reach(int rank, uint64_t offset, uint64_t bytes) const;

  // Cores that these ranks may use between them; each may be bound to some.
  int cores(const std::vector<int>& ranks) const;

  // Whether every rank may read every other's private memory, and such a read. The system may
  // forbid it (ptrace_scope, seccomp); then data passes through shared memory instead.
  bool can_read() const;
  void read(int rank, void* into, uint64_t address, size_t bytes) const;

  RosterHeader& header() const { return *reinterpret_cast<RosterHeader*>(region_->data()); }
  Member& member(int rank) const { return members_of(&header())[rank]; }
  // One more or less of these may act for the rank.
  void change(int rank, std::atomic<int32_t> Member::* count, int by) const;
  void changed(int rank) const;  // something of that kind came or went just now

  ~Roster();
  Roster(const Roster&) = delete;

 private:
  explicit Roster(std::shared_ptr<Region> region);
  void await_others(int rank, Deadline deadline, const std::vector<int32_t>& pids);
  bool try_read(int rank, void* into, uint64_t address, size_t bytes) const;
  std::string how_it_ended(int rank) const;
  std::string exit_code(int rank) const;

  const Origin origin_;
  std::shared_ptr<Region> region_;
  std::vector<std::shared_ptr<HeapView>> heaps_;  // of all ranks, mapped in join
  std::vector<ProcessHandle> processes_;
  std::vector<int> joined_;  // ranks of this process
};

}  // namespace phalanx
