// Ranks that wait for each other for ever. Every thread that has waited for a slice says in the
// roster what for; whoever waits looks there for a set of ranks in which nobody can move.
//
// A rank is blocked when all its threads are. It can move again when one of its waits ends, and
// that takes an action of the ranks it waits for: of all of them in a collective, of any of them in
// a receive from any source. Taking away from the blocked ranks those that others may still free,
// until no more can be taken away, leaves the deadlock.
//
// No rank is told of one that is not there. Each thread judges its own wait, knowing all that was
// done before it looked; a set counts only if every one of its waits was judged after the last
// change of any of its ranks. So all of them stood still at one moment, and stand still since.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "roster.hpp"

namespace phalanx {

struct BlockedWait;

// The waits of ranks of a world that wait for each other for ever; none if there are no such.
std::vector<BlockedWait> find_deadlock(std::span<const Member> members);

// For ranks on several hosts, each of which sees only its own: the waits of the ranks of which all
// threads wait; a deadlock among such waits, of ranks of several rosters that stood still at one
// moment; and the telling of it to the ranks of this roster that still wait.
std::vector<BlockedWait> blocked_waits(const Roster& roster);
struct Found {
  std::vector<int> ranks;
  std::string report;
};
Found deadlock_among(int size, const std::vector<std::pair<int, WaitFacts>>& waits,
                     const std::vector<int>& ended);
void sentence(const Roster& roster, const std::vector<int>& ranks, const std::string& report);

// One thread that waits. Not shown before its first update, so short waits cost nothing.
class Waiter {
 public:
  Waiter(const Roster& roster, int rank, bool lane = false);
  ~Waiter();
  Waiter(const Waiter&) = delete;

  // Show what the thread waits for now. Returns the verdict.
  std::optional<std::string> update(WaitFacts facts);
  // The report of the deadlock that the thread has been found to be part of. To be asked for before
  // looking whether others have failed: they may have, over the same deadlock. It stands until the
  // wait ends or the verdict is dropped, so that meanwhile no other thread of the rank misses it.
  std::optional<std::string> verdict() const;
  // The wait goes on: what it needs has come after all.
  void drop_verdict();

 private:
  void show(int64_t now);
  void count_threads() const;
  bool may_be_stuck(const WaitFacts& facts) const;
  const Roster& roster_;
  int rank_;
  bool lane_;
  int64_t since_ns_ = 0;
  Wait* wait_ = nullptr;
  Origin origin_;
};

// Whether a thread of this rank has been found to be in a deadlock and has not acted on it yet.
bool awaits_verdict(const Roster& roster, int rank);

// The beginnings of what is shown. To be made before the wait is judged: what happens later is not
// taken into account.
WaitFacts wait_facts(Op op, const std::string& group, const std::string& what, const char* site,
                     int64_t started_ns);

// A wait that ends by itself, soon or when its own caller wants, is not one for ever: true for a
// timeout that was given with the call, and for a group's of a second or less.
constexpr double kSoon = 1;
inline bool ends_by_itself(double timeout, bool given_with_call) {
  return given_with_call || (timeout >= 0 && timeout <= kSoon);
}

// How many threads of this process may act for its rank, waiting ones included. Asked on a user's
// thread; -1 if it cannot be known.
using ThreadCount = int (*)();
void set_thread_count(ThreadCount count);

}  // namespace phalanx
