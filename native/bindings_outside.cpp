// What is seen from outside, as Python sees it: dictionaries of plain values.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings_posting.hpp"
#include "bindings_unlocked.hpp"
#include "outside.hpp"
#include "report.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

const char* name(Presence presence) {
  switch (presence) {
    case Presence::Joining:
      return "joining";
    case Presence::Here:
      return "here";
    case Presence::Left:
      return "left";
    case Presence::Failed:
      return "failed";
    default:
      return "absent";
  }
}

template <class Items, class Convert>
nb::list as_list(const Items& items, Convert&& convert) {
  nb::list list;
  for (auto& item : items) list.append(convert(item));
  return list;
}

nb::dict as_dict(const HeapAddress& address) {
  nb::dict entry;
  entry["pid"] = address.pid;
  entry["start_time"] = address.start_time;
  entry["nonce"] = address.nonce;
  return entry;
}

nb::dict as_dict(const WaitFacts& facts, size_t world_size) {
  nb::list needs;
  for (size_t rank = 0; rank < std::min(world_size, size_t(kMostRanks)); ++rank)
    if (facts.needs.has(int(rank))) needs.append(rank);
  nb::dict entry;
  entry["op"] = phalanx::name(facts.op);
  entry["what"] = as_str(facts.what);
  entry["group"] = as_str(facts.group);
  entry["site"] = as_str(facts.site);
  entry["started_ns"] = facts.started_ns;
  entry["needs"] = needs;
  entry["any"] = facts.any;
  entry["blocked"] = facts.blocked;
  entry["lane"] = facts.lane;
  entry["own"] = facts.own;
  entry["making"] = facts.making;
  return entry;
}

nb::dict as_dict(const RosterSeen& roster) {
  nb::dict entry;
  entry["id"] = roster.id;
  entry["threads"] = roster.threads;
  entry["started_ns"] = roster.started_ns;
  entry["deadlock"] = as_str(roster.deadlock);
  entry["members"] = as_list(roster.members, [&](const MemberSeen& member) {
    nb::dict seen = as_dict(member.heap);
    seen["presence"] = name(member.presence);
    seen["remote"] = member.remote;
    seen["thread"] = member.thread;
    seen["host"] = as_str(member.host);
    seen["signal"] = member.signal;
    seen["ended_ns"] = member.ended_ns;
    seen["why"] = as_str(member.why);
    seen["waits"] = as_list(member.waits, [&](const WaitFacts& facts) {
      return as_dict(facts, roster.members.size());
    });
    return seen;
  });
  return entry;
}

nb::object last_operation(const Posting* posting) {
  if (!posting) return nb::none();
  nb::dict entry = phalanx::as_dict(*posting);
  entry["text"] = as_str(posting->describe());
  entry["account"] = as_str(describe_posting(*posting));
  return entry;
}

nb::dict as_dict(const SeatSeen& seat) {
  // The last collective and the last message in full; of the others only how large they were.
  const Posting* last[2] = {nullptr, nullptr};
  nb::list sizes[2];
  for (const Posting& posting : seat.history) {
    bool message = posting.op == Op::Send || posting.op == Op::Recv;
    last[message] = &posting;
    sizes[message].append(byte_count(posting));
  }
  nb::dict entry;
  entry["present"] = seat.present;
  entry["left"] = seat.left;
  entry["clock"] = seat.clock;
  entry["collectives"] = seat.collectives;
  entry["messages"] = seat.messages;
  entry["collective"] = last_operation(last[0]);
  entry["message"] = last_operation(last[1]);
  entry["collective_bytes"] = sizes[0];
  entry["message_bytes"] = sizes[1];
  return entry;
}

nb::dict as_dict(const BoardSeen& board) {
  nb::dict entry;
  entry["id"] = board.id;
  entry["roster"] = board.roster;
  entry["name"] = as_str(board.name);
  entry["broken"] = as_str(board.broken);
  entry["members"] = as_list(board.members, [](int rank) { return nb::int_(rank); });
  entry["seats"] = as_list(board.seats, [](const SeatSeen& seat) { return as_dict(seat); });
  return entry;
}

}  // namespace

void bind_outside(nb::module_& m) {
  m.def(
      "rank_list", [](const std::vector<int>& ranks) { return rank_list(ranks); }, nb::arg("ranks"),
      "Name these ranks, which are in rising order: 'ranks 0-2, 5'.");
  m.def(
      "look_into",
      [](const std::string& path) {
        HeapSeen seen;
        {
          Unlocked unlock;
          seen = look_into(path);
        }
        nb::dict heap = as_dict(seen.address);
        heap["unlisted"] = seen.unlisted;
        heap["rosters"] =
            as_list(seen.rosters, [](const RosterSeen& roster) { return as_dict(roster); });
        heap["boards"] =
            as_list(seen.boards, [](const BoardSeen& board) { return as_dict(board); });
        return heap;
      },
      nb::arg("path"), "Read what the ranks of a process show in its heap, a file in /proc.");
}
