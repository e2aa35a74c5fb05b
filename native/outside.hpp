// What can be seen of the ranks of other processes from outside. Reads their heaps as files and
// needs nothing from them: they may hang, be stopped, or change all of it meanwhile.
//
// Heaps are read, not mapped: a hole in them stays one, and a file that is cut short is no SIGBUS.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layout.hpp"

namespace phalanx {

struct MemberSeen {
  Presence presence;
  bool remote;
  HeapAddress heap;
  int32_t thread, signal;
  int64_t ended_ns;
  std::string host, why;
  std::vector<WaitFacts> waits;
};

struct RosterSeen {
  uint64_t id;
  bool threads;
  int64_t started_ns;
  std::vector<MemberSeen> members;
  std::string deadlock;  // who waits for whom for ever, "" if nobody does
};

struct SeatSeen {
  bool present, left;
  uint32_t clock;  // of the last meeting or tick that its rank has come to
  uint64_t collectives, messages;
  std::vector<Posting> history;  // of both, oldest first
};

struct BoardSeen {
  uint64_t id, roster;
  std::string name, broken;
  std::vector<int> members;
  std::vector<SeatSeen> seats;
};

struct HeapSeen {
  HeapAddress address;
  uint32_t unlisted;  // regions that cannot be seen
  std::vector<RosterSeen> rosters;
  std::vector<BoardSeen> boards;
};

// Look into the file of a heap, /proc/<pid>/fd/<fd>. Whatever it holds, the result is well formed:
// texts are printable, numbers in range. Throws if it is no heap, or one of another version.
HeapSeen look_into(const std::string& path);

}  // namespace phalanx
