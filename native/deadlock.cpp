#include "deadlock.hpp"

#include <algorithm>
#include <climits>
#include <memory>
#include <set>
#include <vector>

#include "failure.hpp"
#include "report.hpp"

namespace phalanx {
namespace {

std::atomic<ThreadCount> thread_count{nullptr};

// Looks all at one moment at who waits for whom, then reasons about it.
class Search {
 public:
  explicit Search(std::span<const Member> members) : members_(members), ranks_(members.size()) {
    for (size_t rank = 0; rank < members.size(); ++rank) look_at(rank);
  }

  // The waits of the ranks of which all threads wait for others, whoever these are.
  std::vector<BlockedWait> blocked() const {
    std::vector<BlockedWait> waits;
    for (auto& rank : ranks_)
      if (rank.blocked) waits.insert(waits.end(), rank.waits.begin(), rank.waits.end());
    return waits;
  }

  // The waits of the ranks that cannot move, empty if there are none.
  std::vector<BlockedWait> stuck() {
    for (bool changed = true; changed;) {
      changed = false;
      for (auto& rank : ranks_)
        if (rank.blocked && can_move(rank)) {
          rank.blocked = false;
          changed = true;
        }
    }
    int64_t last_change = 0, first_look = INT64_MAX;
    std::vector<BlockedWait> waits;
    for (auto& rank : ranks_) {
      if (!rank.blocked) continue;
      last_change = std::max(last_change, rank.changed_ns);
      for (auto& wait : rank.waits) {
        last_change = std::max(last_change, wait.facts.since_ns);
        first_look = std::min(first_look, wait.facts.checked_ns);
        waits.push_back(wait);
      }
    }
    if (first_look < last_change || !unchanged(waits)) waits.clear();
    return waits;
  }

 private:
  struct Rank {
    bool blocked = false, ended = false;
    int64_t changed_ns = 0;
    std::vector<BlockedWait> waits;
  };

  void look_at(size_t number) {
    Rank& rank = ranks_[number];
    const Member& member = members_[number];
    rank.ended = member.presence > Presence::Here;
    if (member.presence != Presence::Here || member.unseen > 0) return;
    int threads = 0, lanes = 0;
    for (const Wait& wait : member.waits) {
      if (!wait.taken.load(std::memory_order_acquire)) continue;
      BlockedWait found{int(number), const_cast<Wait*>(&wait), {}};
      if (!wait.facts.read(found.facts) || !make_sound(found.facts) || !found.facts.blocked) return;
      ++(found.facts.lane ? lanes : threads);
      rank.waits.push_back(found);
    }
    rank.blocked =
        threads + lanes > 0 && threads == member.threads.load() && lanes == member.lanes.load();
    // Read last: a change that is not yet seen above is dated later.
    rank.changed_ns = member.changed_ns.load();
  }

  bool can_move(const Rank& rank) const {
    return std::any_of(rank.waits.begin(), rank.waits.end(), [&](const BlockedWait& wait) {
      if (wait.facts.own) return false;
      bool stuck = false, free = false, ended = false;
      for (size_t peer = 0; peer < members_.size(); ++peer)
        if (wait.facts.needs.has(int(peer)))
          (ranks_[peer].blocked ? stuck : ranks_[peer].ended ? ended : free) = true;
      // Whoever needs one that has ended is told so, and goes on.
      return wait.facts.any ? free || !stuck : ended || !stuck;
    });
  }

  bool unchanged(const std::vector<BlockedWait>& waits) const {
    for (auto& rank : ranks_)
      if (rank.blocked &&
          members_[size_t(&rank - ranks_.data())].changed_ns.load() != rank.changed_ns)
        return false;
    return std::all_of(waits.begin(), waits.end(), [](const BlockedWait& seen) {
      WaitFacts now;
      return seen.wait->taken && seen.wait->facts.read(now) && make_sound(now) && now.blocked &&
             now.since_ns == seen.facts.since_ns;
    });
  }

  std::span<const Member> members_;
  std::vector<Rank> ranks_;
};

// Whoever tells of a deadlock for longer has died over it.
constexpr int64_t kLong = 1'000'000'000;

void tell(const Roster& roster, const std::vector<BlockedWait>& waits, const std::string& text) {
  auto& count = roster.header().deadlocks;
  auto& since = roster.header().telling_since_ns;
  uint32_t before = count.load();
  // Somebody else tells them, or has just done so; or has died over it.
  if (before % 2 && now_ns() - since > kLong) count.compare_exchange_strong(before, before + 1);
  if (before % 2 || !count.compare_exchange_strong(before, before + 1)) return;
  since = now_ns();
  bool told = std::any_of(waits.begin(), waits.end(), [](const BlockedWait& found) {
    return found.wait->doom.load() == found.facts.since_ns;
  });
  if (!told) {
    uint32_t number = before / 2 + 1;
    DeadlockReport& report = roster.header().reports[number % 4];
    report.number = 0;
    report.length = uint32_t(text.copy(report.text, sizeof report.text));
    report.number = number;
    for (auto& found : waits) {
      if (found.facts.own) continue;  // it will see the wait fail that it waits for
      found.wait->report = number;
      found.wait->doom = found.facts.since_ns;
    }
  }
  count.store(before + (told ? 0 : 2));
}

}  // namespace

bool awaits_verdict(const Roster& roster, int rank) {
  auto& waits = roster.member(rank).waits;
  return std::any_of(std::begin(waits), std::end(waits), [](const Wait& wait) {
    WaitFacts facts;
    // Facts that are just being written may be of the wait that is meant: then the answer is yes.
    return wait.taken && wait.doom && (!wait.facts.read(facts) || wait.doom == facts.since_ns);
  });
}

std::vector<BlockedWait> find_deadlock(std::span<const Member> members) {
  if (members.size() > size_t(kMostRanks)) return {};
  return Search(members).stuck();
}

std::vector<BlockedWait> blocked_waits(const Roster& roster) {
  if (roster.size() > kMostRanks) return {};
  return Search({&roster.member(0), size_t(roster.size())}).blocked();
}

Found deadlock_among(int size, const std::vector<std::pair<int, WaitFacts>>& waits,
                     const std::vector<int>& ended) {
  if (size < 0 || size > kMostRanks) return {};
  auto check = [&](int rank) {
    if (rank < 0 || rank >= size)
      throw Failure(Kind::Invalid, "rank " + std::to_string(rank) + " is not in a world of " +
                                       std::to_string(size));
  };
  for (int rank : ended) check(rank);
  for (auto& [rank, facts] : waits) check(rank);
  // As a world of their own, in which nothing has happened since they were looked at.
  auto members = std::make_unique<Member[]>(size_t(size));
  for (int rank = 0; rank < size; ++rank) members[rank].presence = Presence::Here;
  for (int rank : ended) members[rank].presence = Presence::Left;
  for (auto [rank, facts] : waits) {
    Member& member = members[rank];
    auto* free = std::find_if(std::begin(member.waits), std::end(member.waits),
                              [](const Wait& wait) { return !wait.taken; });
    if (free == std::end(member.waits)) continue;
    (facts.lane ? member.lanes : member.threads) += 1;
    facts.since_ns = facts.checked_ns = 1;
    free->facts.write(facts);
    free->taken = true;
  }
  Found found;
  auto stuck = find_deadlock({members.get(), size_t(size)});
  if (stuck.empty()) return found;
  std::set<int> ranks;
  for (auto& wait : stuck) ranks.insert(wait.rank);
  found.ranks.assign(ranks.begin(), ranks.end());
  found.report = deadlock_report(size_t(size), stuck);
  return found;
}

void sentence(const Roster& roster, const std::vector<int>& ranks, const std::string& report) {
  auto waits = blocked_waits(roster);
  std::erase_if(waits, [&](const BlockedWait& wait) {
    return std::find(ranks.begin(), ranks.end(), wait.rank) == ranks.end();
  });
  if (!waits.empty()) tell(roster, waits, report);
}

void set_thread_count(ThreadCount count) { thread_count.store(count); }

WaitFacts wait_facts(Op op, const std::string& group, const std::string& what, const char* site,
                     int64_t started_ns) {
  WaitFacts facts;
  facts.checked_ns = now_ns();
  facts.started_ns = started_ns;
  facts.op = op;
  group.copy(facts.group, sizeof facts.group - 1);
  what.copy(facts.what, sizeof facts.what - 1);
  std::strncpy(facts.site, site, sizeof facts.site - 1);
  return facts;
}

Waiter::Waiter(const Roster& roster, int rank, bool lane)
    : roster_(roster), rank_(rank), lane_(lane) {}

Waiter::~Waiter() {
  if (!origin_.is_here()) return;
  if (wait_) {
    wait_->taken = false;
    roster_.changed(rank_);
  } else if (since_ns_) {
    roster_.change(rank_, &Member::unseen, -1);
  }
}

void Waiter::show(int64_t now) {
  since_ns_ = now;
  for (Wait& wait : roster_.member(rank_).waits) {
    bool free = false;
    if (!wait.taken.compare_exchange_strong(free, true)) continue;
    wait_ = &wait;
    roster_.changed(rank_);
    return;
  }
  roster_.change(rank_, &Member::unseen, 1);
}

// Thread ranks are counted as their threads come and go.
void Waiter::count_threads() const {
  auto count = thread_count.load();
  if (lane_ || roster_.threads() || !count) return;
  int threads = count();  // by Python, which may run a signal handler
  if (!origin_.is_here()) throw_forked();
  if (threads < 0) threads = INT_MAX;
  if (roster_.member(rank_).threads.exchange(threads) != threads) roster_.changed(rank_);
}

// A quick look: those that it needs wait as well.
bool Waiter::may_be_stuck(const WaitFacts& facts) const {
  if (!facts.blocked) return false;
  auto waits = [&](int rank) {
    auto& all = roster_.member(rank).waits;
    return std::any_of(std::begin(all), std::end(all),
                       [](const Wait& wait) { return wait.taken.load(); });
  };
  bool some = false, every = true;
  for (int rank = 0; rank < roster_.size(); ++rank) {
    if (!facts.needs.has(rank)) continue;
    bool one = waits(rank);
    some |= one;
    every &= one;
  }
  return facts.own || (facts.any ? every : some);
}

std::optional<std::string> Waiter::update(WaitFacts facts) {
  const int64_t now = now_ns();
  if (!since_ns_) show(now);
  if (!wait_) return {};
  count_threads();
  facts.lane = lane_;
  facts.since_ns = since_ns_;
  wait_->facts.write(facts);
  if (may_be_stuck(facts))
    if (auto waits = find_deadlock({&roster_.member(0), size_t(roster_.size())}); !waits.empty())
      tell(roster_, waits, deadlock_report(size_t(roster_.size()), waits));
  return verdict();
}

void Waiter::drop_verdict() {
  if (wait_) wait_->doom = 0;
}

std::optional<std::string> Waiter::verdict() const {
  if (!wait_ || wait_->doom.load() != since_ns_) return {};
  // Not before all have been told: to the last the end of the first would be news.
  const RosterHeader& header = roster_.header();
  if (header.deadlocks.load() % 2 && now_ns() - header.telling_since_ns < kLong) return {};
  const DeadlockReport& report = roster_.header().reports[wait_->report % 4];
  std::string text(report.text, std::min<size_t>(report.length, sizeof report.text));
  return report.number == wait_->report ? text : "ranks wait for each other and none can go on";
}

}  // namespace phalanx
