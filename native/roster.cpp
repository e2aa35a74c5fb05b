#include "roster.hpp"

#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "failure.hpp"

namespace phalanx {

namespace {

// How long a program may take to end after its rank has said goodbye, before peers stop waiting for
// its exit code: torch takes a few tenths of a second.
constexpr int64_t kPatience = 900'000'000;

// Whether a process lives that has put another program in the place of its own.
bool has_called_exec(const HeapAddress& process, const ProcessFacts& now) {
  return now.start_time == process.start_time && now.stack && process.stack &&
         now.stack != process.stack;
}

bool has_ended(const HeapAddress& process) {
  ProcessFacts now = facts_of(process.pid);
  if (now.start_time == kUnknownStart) return false;
  return now.start_time != process.start_time || has_called_exec(process, now);
}

}  // namespace

Roster::Roster(std::shared_ptr<Region> region) : region_(std::move(region)) {}

Roster::~Roster() {
  for (int rank : joined_) forget_fatal_signals(&member(rank).signal);
}

int Roster::size() const { return int(header().size); }

int Roster::checked(int rank) const {
  if (rank < 0 || rank >= size())
    throw Failure(Kind::Invalid, "rank " + std::to_string(rank) + " is not in a world of " +
                                     std::to_string(size()));
  return rank;
}

std::shared_ptr<Roster> Roster::create(int size, bool threads, int near) {
  if (size < 1)
    throw Failure(Kind::Invalid, "a world has at least 1 rank, not " + std::to_string(size));
  if (!threads) Heap::mine(near ? near : size);
  auto region =
      Region::create(sizeof(RosterHeader) + size * sizeof(Member), threads, Content::Roster);
  auto& header = *reinterpret_cast<RosterHeader*>(region->data());
  header.size = uint32_t(size);
  header.threads = threads;
  header.started_ns = now_ns();
  return std::shared_ptr<Roster>(new Roster(std::move(region)), DeleteHere());
}

std::shared_ptr<Roster> Roster::open(const std::string& ticket) {
  auto region = Region::open(ticket, Content::Roster);
  const uint64_t room = region->bytes() - std::min(region->bytes(), sizeof(RosterHeader));
  std::shared_ptr<Roster> roster(new Roster(std::move(region)), DeleteHere());
  if (roster->size() < 1 || room / sizeof(Member) < uint64_t(roster->size()))
    throw Failure(Kind::Backend, "the ticket '" + ticket + "' stands for something damaged");
  return roster;
}

void Roster::join(int rank, Deadline deadline, const std::vector<int32_t>& pids) {
  Member& me = member(checked(rank));
  auto expected = Presence::Absent;
  if (!me.presence.compare_exchange_strong(expected, Presence::Joining))
    throw Failure(Kind::Backend, "rank " + std::to_string(rank) + " was claimed twice: by " +
                                     title(rank) + " and by pid " + std::to_string(::getpid()));
  me.heap = Heap::mine(threads() ? 1 : size() - int(header().remote))->address();
  me.thread = ::gettid();
  me.base = threads() ? 0 : reinterpret_cast<uint64_t>(Heap::mine()->at(0));
  me.cores = usable_cores();
  me.threads = 1;
  me.oom_kills = count_oom_kills();
  host_name().copy(me.host, sizeof me.host - 1);
  if (!threads()) {
    note_fatal_signals(&me.signal);
    joined_.push_back(rank);
  }
  me.presence = Presence::Here;
  header().bell.ring();
  try {
    await_others(rank, deadline, pids);
  } catch (const Failure& failure) {
    // The others are told why, rather than that this one is gone. They have a timeout of their own.
    if (failure.kind != Kind::Timeout)
      fail(rank, std::string("gave up init_process_group: ") + failure.what());
    throw;
  }
}

void Roster::await_others(int rank, Deadline deadline, const std::vector<int32_t>& pids) {
  std::vector<uint64_t> starts;
  for (int32_t pid : pids) starts.push_back(pid ? facts_of(pid).start_time : 0);
  int next = 0;
  auto await = [&](auto&& ready) {
    Spin spin(false);
    wait_until(header().bell, spin, deadline, ready, [&](bool costly) {
      std::string missing;
      for (int peer = 0; peer < size(); ++peer) {
        if (member(peer).presence >= Presence::Here) continue;
        missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
        if (!costly || peer >= int(pids.size()) || !pids[peer]) continue;
        const uint64_t start = facts_of(pids[peer]).start_time;
        const bool gone = start != kUnknownStart && (start == 0 || start != starts[peer]);
        if (gone && member(peer).presence < Presence::Here)
          throw Failure(Kind::PeerFailed,
                        "init_process_group on rank " + std::to_string(rank) + ": rank " +
                            std::to_string(peer) + " (pid " + std::to_string(pids[peer]) +
                            " on host " + host_name() +
                            ") has ended before all ranks had joined; look at its output first");
      }
      // After those that never came, since of their end these may have died.
      for (int peer = 0; costly && peer < size(); ++peer) {
        std::string end = obituary(peer, true);
        // Looked at again: all may have joined, and this one have ended after that.
        if (!end.empty() && !ready()) throw Failure(Kind::PeerFailed, "init_process_group: " + end);
      }
      if (deadline.passed())
        throw Failure(Kind::Timeout,
                      "init_process_group on rank " + std::to_string(rank) + " timed out: " +
                          (missing.empty() ? "not all ranks have reached all others"
                                           : "these ranks have not joined: " + missing));
      if (costly) check_interrupt();
    });
  };
  await([&] {
    while (next < size() && member(next).presence.load(std::memory_order_acquire) >= Presence::Here)
      ++next;
    return next == size();
  });
  if (threads()) return;
  // Nobody goes on before all have mapped all, so what a rank leaves behind can still be read.
  for (int peer = 0; peer < size(); ++peer) {
    const bool remote = member(peer).remote;
    heaps_.push_back(remote ? nullptr : HeapView::open(member(peer).heap));
    processes_.emplace_back(remote ? 0 : member(peer).heap.pid);
    if (remote) continue;
    char header_bytes[8];
    if (!try_read(peer, header_bytes, member(peer).base, sizeof header_bytes))
      header().reading_is_denied = true;
  }
  header().probed.fetch_add(1);
  header().bell.ring();
  await([&] { return header().probed.load() == header().size - header().remote; });
}

void Roster::place(int rank, const std::string& host, int pid) {
  Member& peer = member(checked(rank));
  peer.remote = true;
  peer.heap.pid = pid;
  host.copy(peer.host, sizeof peer.host - 1);
  peer.presence = Presence::Here;
  ++header().remote;
}

int Roster::cores(const std::vector<int>& ranks) const {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int rank : ranks) CPU_OR(&all, &all, &member(rank).cores);
  return CPU_COUNT(&all);
}

bool Roster::can_read() const { return !threads() && !header().reading_is_denied; }

bool Roster::try_read(int rank, void* into, uint64_t address, size_t bytes) const {
  auto* target = static_cast<std::byte*>(into);
  while (bytes > 0) {
    iovec local{target, bytes}, remote{reinterpret_cast<void*>(address), bytes};
    ssize_t got = ::process_vm_readv(member(rank).heap.pid, &local, 1, &remote, 1, 0);
    if (got <= 0) return false;
    target += got;
    address += uint64_t(got);
    bytes -= size_t(got);
  }
  return true;
}

void Roster::read(int rank, void* into, uint64_t address, size_t bytes) const {
  if (try_read(rank, into, address, bytes)) return;
  std::string why = std::strerror(errno);
  // A process that is ending has lost its memory a moment before the system says so.
  for (Deadline soon = Deadline::in(10); !soon.passed(); ::usleep(1000))
    if (std::string end = obituary(rank, true); !end.empty()) throw Failure(Kind::PeerFailed, end);
  throw Failure(Kind::Backend, "cannot read the memory of " + title(rank) + ": " + why);
}

void Roster::change(int rank, std::atomic<int32_t> Member::* count, int by) const {
  if (!origin_.is_here()) return;
  (member(rank).*count).fetch_add(by);
  changed(rank);
}

void Roster::changed(int rank) const {
  auto& last = member(rank).changed_ns;
  int64_t now = now_ns(), before = last.load();
  while (before < now && !last.compare_exchange_weak(before, now)) continue;
}

void Roster::leave(int rank) {
  if (!origin_.is_here()) return;
  auto here = Presence::Here;
  if (member(checked(rank)).presence == here) member(rank).ended_ns = now_ns();
  member(rank).presence.compare_exchange_strong(here, Presence::Left);
  header().bell.ring();
}

void Roster::fail(int rank, const std::string& why) {
  if (!origin_.is_here()) return;
  Member& me = member(checked(rank));
  if (me.presence == Presence::Failed) return;
  // The end of a traceback says what happened.
  size_t length = std::min(why.size(), sizeof me.why);
  std::memcpy(me.why, why.data() + why.size() - length, length);
  me.why_length = uint32_t(length);
  me.ended_ns = now_ns();
  me.presence = Presence::Failed;
  header().bell.ring();
}

std::string Roster::title(int rank) const {
  const Member& who = member(rank);
  std::string text = "rank " + std::to_string(rank);
  if (threads() || !who.heap.pid) return text;
  return text + " (pid " + std::to_string(who.heap.pid) + " on host " + who.host + ")";
}

int64_t Roster::ended_ns(int rank) const { return member(rank).ended_ns; }

std::string Roster::how_it_ended(int rank) const {
  const Member& peer = member(rank);
  if (has_called_exec(peer.heap, facts_of(peer.heap.pid)))
    return "called exec without leaving its groups: its process now runs '" +
           program_name(peer.heap.pid) + "' (destroy_process_group before exec)";
  int status = rank < int(processes_.size()) ? processes_[rank].status() : -1;
  int signal = status >= 0 ? status & 0x7f : peer.signal.load();
  if (signal == SIGKILL) {
    int64_t now = count_oom_kills();
    return std::string("was killed by SIGKILL") +
           (now > peer.oom_kills && peer.oom_kills >= 0
                ? "; the system's out-of-memory killer has struck since the start, so probably for "
                  "lack of memory"
                : " (by somebody, or by the system for lack of memory: see dmesg)");
  }
  if (signal)
    return (signal == SIGTERM || signal == SIGHUP ? "was ended by " : "crashed with ") +
           signal_name(signal);
  if (status >= 0)
    return "exited with code " + std::to_string(status >> 8) +
           " without leaving its groups (os._exit)";
  return "is gone: it was killed (SIGKILL, perhaps for lack of memory) or left by os._exit";
}

bool Roster::is_ending(int rank) const {
  const Member& peer = member(rank);
  return !threads() && !peer.remote &&
         peer.presence.load(std::memory_order_acquire) == Presence::Left && !has_ended(peer.heap) &&
         now_ns() - peer.ended_ns < kPatience;
}

// How a program has ended whose rank said goodbye, if the system still knows.
std::string Roster::exit_code(int rank) const {
  if (threads() || member(rank).remote || rank >= int(processes_.size())) return "";
  int status = has_ended(member(rank).heap) ? processes_[rank].status() : -1;
  if (status < 0 || status & 0x7f) return "";
  return " with exit code " + std::to_string(status >> 8) +
         " (sys.exit, or the end of its program)";
}

std::string Roster::obituary(int rank, bool ask_system) const {
  const Member& peer = member(checked(rank));
  switch (peer.presence.load(std::memory_order_acquire)) {
    case Presence::Failed:
      return title(rank) + " " +
             std::string(peer.why, std::min<size_t>(peer.why_length, sizeof peer.why));
    case Presence::Left:
      if (is_ending(rank)) return "";
      return title(rank) + " has ended" + exit_code(rank) + " and will not come";
    case Presence::Here:
      if (ask_system && !threads() && !peer.remote && has_ended(peer.heap))
        return title(rank) + " " + how_it_ended(rank);
      return "";
    default:
      return "";
  }
}

void Roster::note(int rank, const std::string& text) {
  if (!origin_.is_here()) return;
  checked(rank);
  Note note{};
  size_t start = text.size() - std::min(text.size(), sizeof note.text);
  while (start > 0 && start < text.size() && (text[start] & 0xC0) == 0x80)
    ++start;  // a whole character
  note.length = uint32_t(text.size() - start);
  std::memcpy(note.text, text.data() + start, note.length);
  member(rank).note.write(note);
}

std::vector<std::string> Roster::notes() const {
  std::vector<std::string> texts;
  for (int rank = 0; rank < size(); ++rank) {
    Note note;
    bool whole = false;
    for (int attempt = 0; attempt < 100 && !whole; ++attempt) whole = member(rank).note.read(note);
    texts.emplace_back(note.text, whole ? std::min<size_t>(note.length, sizeof note.text) : 0);
  }
  return texts;
}

std::byte* Roster::reach(int rank, uint64_t offset, uint64_t bytes) const {
  if (threads()) return reinterpret_cast<std::byte*>(offset);
  if (!heaps_[rank])
    throw Failure(Kind::Backend, title(rank) + " is on another host: its memory is not shared");
  return heaps_[rank]->at(offset, bytes);
}

}  // namespace phalanx
