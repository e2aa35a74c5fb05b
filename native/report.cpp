#include "report.hpp"

#include <algorithm>
#include <cstdio>
#include <set>

namespace phalanx {
namespace {

std::string ago(int64_t then_ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", double(now_ns() - then_ns) * 1e-9);
  return text;
}

// Lines of columns, each as wide as its widest text.
class Table {
 public:
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const {
    std::vector<size_t> widths;
    for (auto& row : rows_) {
      widths.resize(std::max(widths.size(), row.size()));
      for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    std::string text;
    for (auto& row : rows_) {
      text += '\n';
      for (size_t i = 0; i < row.size(); ++i) {
        text.append(2, ' ').append(row[i]);
        if (i + 1 < row.size()) text.append(widths[i] - row[i].size(), ' ');
      }
    }
    return text;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

// Ranks that have posted the same thing from the same line.
struct Party {
  std::vector<int> ranks;
  const Posting* posting;
  std::string what, site;
};

std::vector<Party> parties_of(const Board& board, uint64_t sequence) {
  std::vector<Party> parties;
  for (int rank = 0; rank < board.size(); ++rank) {
    const Posting& posting = board.posting(rank, sequence);
    std::string what = posting.describe(), site = posting.site;
    auto same = std::find_if(parties.begin(), parties.end(),
                             [&](Party& p) { return p.what == what && p.site == site; });
    if (same == parties.end())
      same = parties.insert(parties.end(), Party{{}, &posting, what, site});
    same->ranks.push_back(rank);
  }
  return parties;
}

std::string table_of(const Board& board, const std::vector<Party>& parties) {
  Table table;
  for (auto& party : parties) table.add({board.world_ranks(party.ranks), party.what, party.site});
  return table.text();
}

// Whether a rank did, one call ago, what another does now, having done something else then. (If
// both did the same then, they have parted only now.)
bool is_behind(const Board& board, const Party& slow, const Party& fast) {
  uint64_t before = fast.posting->sequence - 1;
  const Posting &theirs = board.posting(fast.ranks[0], before),
                &own = board.posting(slow.ranks[0], before);
  auto same = [](const Posting& a, const Posting& b) {
    return a.describe() == b.describe() && std::strcmp(a.site, b.site) == 0;
  };
  return before > 0 && theirs.sequence == before && own.sequence == before &&
         same(theirs, *slow.posting) && !same(theirs, own);
}

// Two ranks whose lists do not fit each other, in an operation that is otherwise the same for all.
std::string misfit(const Board& board, uint64_t sequence) {
  const Posting& first = board.posting(0, sequence);
  for (int rank = 1; rank < board.size(); ++rank) {
    const Posting& posting = board.posting(rank, sequence);
    if (posting.op != first.op || posting.dtype != first.dtype || posting.parts != first.parts ||
        posting.reduce != first.reduce)
      return "";
  }
  auto name = [&](int rank) { return "rank " + std::to_string(board.world_rank(rank)); };
  for (int from = 0; from < board.size(); ++from)
    for (int to = 0; to < board.size(); ++to) {
      const Parcel &mine = board.parcel(from, to, sequence),
                   &theirs = board.parcel(to, from, sequence);
      const size_t item = item_size(first.dtype);
      uint64_t given = mine.given / item, expected = theirs.taken / item;
      if (first.op == Op::AllGather) given = board.posting(from, sequence).count;
      if (first.op == Op::ReduceScatter) expected = board.parcel(to, to, sequence).given / item;
      bool paired = first.op == Op::AllGather || first.op == Op::ReduceScatter ||
                    (first.op == Op::AllToAll && from != to);
      if (paired && given != expected)
        return name(from) + " has " + std::to_string(given) + " elements for " + name(to) +
               ", which expects " + std::to_string(expected);
    }
  return "";
}

// The likely reason, judged by the two largest parties.
std::string likely_reason(const Board& board, std::vector<Party> parties) {
  if (parties.size() < 2)
    return "the ranks differ in the sizes of their parts (the list of tensors, or the split sizes)";
  std::stable_sort(parties.begin(), parties.end(),
                   [](auto& a, auto& b) { return a.ranks.size() > b.ranks.size(); });
  const Party &most = parties[0], &few = parties[1];
  const Posting &a = *most.posting, &b = *few.posting;
  std::string who = board.world_ranks(few.ranks),
              sites = "compare " + most.site + " with " + few.site;
  const bool one = few.ranks.size() == 1;
  if (is_behind(board, few, most))
    return who + (one ? " is" : " are") + " one call behind: " + few.site +
           " was called once more than on the other ranks (look at how often that loop runs)";
  if (is_behind(board, most, few))
    return who + (one ? " is" : " are") + " one call ahead: " + most.site +
           " was called once less than on the other ranks (look at how often that loop runs)";
  if (a.kind() != b.kind() || most.site != few.site) {
    if (a.kind() == b.kind() && most.what == few.what)
      return who + " came from another line: " + sites;
    return who + " took another branch: " + sites +
           "; all ranks of a group must make the same calls in the same order (look for a "
           "condition on the rank or on data that differs)";
  }
  std::string line = "the same line, " + most.site + ", ";
  if (a.parts != b.parts)
    return line + "brings " + std::to_string(a.parts) + " tensors on " +
           board.world_ranks(most.ranks) + " and " + std::to_string(b.parts) + " on " + who +
           ": all ranks must pass equally many";
  if (a.dtype != b.dtype)
    return line +
           "gets tensors of different dtype: cast them alike before the call (look for "
           "autocast, .half() or a default dtype that only some ranks set)";
  if (a.root != b.root)
    return line + "names different ranks as source or destination: it must be the same on all";
  if (a.reduce != b.reduce) return line + "asks for different reductions";
  if (a.measured != b.measured)
    return line + "asks for the sum of squares on some ranks only: pass squares on all or none";
  if (a.count != b.count)
    return line + "gets tensors of " + std::to_string(a.count) + " elements on " +
           board.world_ranks(most.ranks) + " and of " + std::to_string(b.count) + " on " + who +
           ": look at what " + who +
           " computes differently (an uneven last batch, another vocabulary or file, a gradient "
           "that is None and was skipped)";
  return line + "differs in the sizes of its parts (the list of tensors, or the split sizes)";
}

std::string where(const WaitFacts& facts) {
  std::string text = facts.what;
  return facts.making ? text : text + " on group '" + facts.group + "'";
}

std::string doing(const Roster& roster, int world_rank, const std::optional<Posting>& last) {
  const Member& member = roster.member(world_rank);
  for (const Wait& wait : member.waits) {
    WaitFacts facts;
    if (!wait.taken.load(std::memory_order_acquire) || !wait.facts.read(facts) || facts.own)
      continue;
    return "waits in " + where(facts) + " at " + facts.site + ", for " + ago(facts.started_ns);
  }
  std::string text;
  if (!roster.threads() && process_state(member.heap.pid) == 'T')
    text = "is stopped (SIGSTOP, or a debugger); it ";
  if (member.presence > Presence::Here) {
    std::string end = roster.obituary(world_rank, false);
    end = end.substr(0, end.find('\n'));
    return end.substr(std::min(roster.title(world_rank).size() + 1, end.size()));
  }
  if (!last) return text + "has made no call on this group yet";
  bool ended = last->finished_ns != 0;
  return text + (ended ? "is busy in its own code; its last call here: " : "is in ") +
         describe_posting(*last);
}

}  // namespace

std::string rank_list(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i;
    while (end + 1 < ranks.size() && int64_t{ranks[end + 1]} == int64_t{ranks[end]} + 1) ++end;
    text += (i ? ", " : "") + std::to_string(ranks[i]);
    if (end > i) text += (end == i + 1 ? ", " : "-") + std::to_string(ranks[end]);
    i = end + 1;
  }
  return text;
}

std::string describe_posting(const Posting& posting) {
  std::string text =
      posting.describe() + " #" + std::to_string(posting.number()) + " at " + posting.site;
  if (!posting.finished_ns) return text + ", for " + ago(posting.posted_ns);
  text += std::string(", ") + name(posting.progress);
  if (posting.progress == Progress::TimedOut)
    text += " after " + seconds_text(double(posting.finished_ns - posting.posted_ns) * 1e-9);
  return text + ", " + ago(posting.finished_ns) + " ago";
}

std::string mismatch_report(const Board& board, uint64_t sequence) {
  std::vector<Party> parties = parties_of(board, sequence);
  const Posting& first = board.posting(0, sequence);
  bool same_digests = true, same_shapes = true;
  for (int rank = 1; rank < board.size(); ++rank) {
    same_digests &= board.posting(rank, sequence).digest() == first.digest();
    same_shapes &= board.posting(rank, sequence).is_shaped_like(first);
  }
  std::string reason =
      same_digests && !same_shapes
          ? "the ranks bring equally many elements in different shapes, which only debug level "
            "DETAIL refuses: give them one shape (tensor.view), or use INFO or OFF"
          : misfit(board, sequence);
  if (reason.empty()) reason = likely_reason(board, parties);
  return first.title() + " on " + board.title() + " does not match across ranks" +
         table_of(board, parties) + "\n" + reason + "\nno tensor was changed";
}

std::string shapes_report(const Board& board, uint64_t sequence) {
  return board.posting(0, sequence).title() + " on " + board.title() +
         ": the ranks bring equally many elements in different shapes" +
         table_of(board, parties_of(board, sequence));
}

std::string describe_absent(const Board& board, std::span<const int> ranks) {
  std::string text;
  for (int rank : ranks)
    text += "\n  rank " + std::to_string(board.world_rank(rank)) + " " +
            (board.seat(rank).left
                 ? "has left this group"
                 : doing(board.roster(), board.world_rank(rank), board.last_posting(rank)));
  return text;
}

std::string deadlock_report(size_t world_size, const std::vector<BlockedWait>& waits) {
  std::set<int> stuck;
  for (auto& found : waits) stuck.insert(found.rank);
  auto needed = [&](const BlockedWait& found) {
    std::vector<int> ranks;
    for (int rank : stuck)
      if (found.facts.needs.has(rank)) ranks.push_back(rank);
    return ranks;
  };
  Table table;
  std::vector<int> next(world_size, -1);
  std::vector<bool> loose(world_size);
  std::set<std::string> groups;
  bool all_receive = true, all_meet = true, sends = false, making = false;
  for (auto& found : waits) {
    if (found.facts.own) continue;
    std::vector<int> blockers = needed(found);
    // What only one rank can end explains more than what any of several could.
    bool better = next[found.rank] < 0 || (loose[found.rank] && !found.facts.any);
    if (better && !blockers.empty()) {
      next[found.rank] = blockers[0];
      loose[found.rank] = found.facts.any;
    }
    groups.insert(found.facts.group);
    all_receive &= found.facts.op == Op::Recv;
    all_meet &= !is_message(found.facts.op);
    sends |= found.facts.op == Op::Send;
    making |= found.facts.making;
    table.add({"rank " + std::to_string(found.rank), "waits for " + rank_list(blockers),
               "in " + where(found.facts), std::string("at ") + found.facts.site});
  }
  // Follow one blocker each until a rank comes again.
  auto sure = std::find_if(stuck.begin(), stuck.end(), [&](int rank) { return !loose[rank]; });
  int at = sure == stuck.end() ? *stuck.begin() : *sure;
  for (size_t step = 0; step < stuck.size() && next[at] >= 0; ++step) at = next[at];
  std::string cycle = "rank " + std::to_string(at);
  for (int rank = next[at]; rank >= 0; rank = next[rank]) {
    cycle += " -> rank " + std::to_string(rank);
    if (rank == at) break;
  }
  std::string advice;
  if (making)
    advice =
        "a new group is made by all ranks together, also by those that are not in it: call "
        "new_group (split_group, init_device_mesh) on every rank, in one order";
  else if (all_receive)
    advice = "everybody receives first: let one side send first, or use batch_isend_irecv";
  else if (all_meet && groups.size() > 1)
    advice = "the ranks use these groups in different order: call them in one order on all ranks";
  else if (sends)
    advice =
        "a large message is sent only when it is received: post the receives (irecv) before you "
        "wait for sends";
  else
    advice = "make the ranks come to these calls in an order in which one of them can go on";
  return rank_list(std::vector<int>(stuck.begin(), stuck.end())) +
         " wait for each other and none of them can go on" + table.text() + "\n  cycle: " + cycle +
         "\n" + advice;
}

}  // namespace phalanx
