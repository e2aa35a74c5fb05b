#include "roster.hpp"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "failure.hpp"

namespace phalanx {

struct Roster::Header {
  uint32_t size;
  Bell bell;
  std::atomic<uint32_t> probed;         // ranks that have tried to read the others' memory
  std::atomic<bool> reading_is_denied;  // to at least one of them
};

// Written by its rank and read by others at any time: a reader that met a writer tries again.
struct Roster::Note {
  std::atomic<uint32_t> version;  // odd while being written
  std::atomic<uint32_t> length;
  std::atomic<uint64_t> words[1024];

  void write(std::string text) {
    if (text.size() > sizeof words) {
      size_t start = text.size() - sizeof words;
      while (start < text.size() && (text[start] & 0xC0) == 0x80) ++start;  // a whole character
      text.erase(0, start);
    }
    version.fetch_add(1, std::memory_order_acq_rel);
    std::atomic_thread_fence(std::memory_order_release);
    length.store(uint32_t(text.size()), std::memory_order_relaxed);
    for (size_t at = 0; at < text.size(); at += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
      words[at / sizeof word].store(word, std::memory_order_relaxed);
    }
    version.fetch_add(1, std::memory_order_release);
  }

  // A writer that died in the middle leaves what can be read.
  std::string read() const {
    std::string text;
    for (int attempt = 0; attempt < 100; ++attempt) {
      uint32_t before = version.load(std::memory_order_acquire);
      text.assign(std::min<size_t>(length.load(std::memory_order_relaxed), sizeof words), '\0');
      for (size_t at = 0; at < text.size(); at += sizeof(uint64_t)) {
        uint64_t word = words[at / sizeof word].load(std::memory_order_relaxed);
        std::memcpy(text.data() + at, &word, std::min(sizeof word, text.size() - at));
      }
      std::atomic_thread_fence(std::memory_order_acquire);
      if (before % 2 == 0 && version.load(std::memory_order_relaxed) == before) break;
    }
    return text;
  }
};

struct Roster::Member {
  std::atomic<Presence> presence;
  HeapAddress heap;
  uint64_t base;  // of its heap in its own address space
  cpu_set_t cores;
  std::atomic<uint32_t> why_length;
  char why[4096];
  Note note;
};

namespace {

bool has_ended(const HeapAddress& process) {
  uint64_t start = process_start_time(process.pid);
  return start != kUnknownStart && start != process.start_time;
}

}  // namespace

Roster::Roster(std::shared_ptr<Region> region) : region_(std::move(region)) {}

Roster::Header& Roster::header() const { return *reinterpret_cast<Header*>(region_->data()); }

Roster::Member& Roster::member(int rank) const {
  return reinterpret_cast<Member*>(region_->data() + sizeof(Header))[rank];
}

int Roster::size() const { return int(header().size); }

std::shared_ptr<Roster> Roster::create(int size, bool threads) {
  auto region = Region::create(sizeof(Header) + size * sizeof(Member), threads);
  reinterpret_cast<Header*>(region->data())->size = uint32_t(size);
  return std::shared_ptr<Roster>(new Roster(std::move(region)));
}

std::shared_ptr<Roster> Roster::open(const std::string& ticket) {
  return std::shared_ptr<Roster>(new Roster(Region::open(ticket)));
}

void Roster::join(int rank, Deadline deadline) {
  if (rank < 0 || rank >= size())
    throw Failure(Kind::Invalid, "rank " + std::to_string(rank) + " is not in a world of " +
                                     std::to_string(size()));
  Member& me = member(rank);
  auto expected = Presence::Absent;
  if (!me.presence.compare_exchange_strong(expected, Presence::Joining))
    throw Failure(Kind::Backend, "rank " + std::to_string(rank) + " was claimed twice: by " +
                                     title(rank) + " and by pid " + std::to_string(::getpid()));
  if (threads())
    me.heap.pid = ::getpid();
  else
    me.heap = Heap::mine()->address();
  me.base = threads() ? 0 : reinterpret_cast<uint64_t>(Heap::mine()->at(0));
  me.cores = usable_cores();
  me.presence = Presence::Here;
  header().bell.ring();

  int next = 0;
  auto await = [&](auto&& ready) {
    Spin spin(false);
    wait_until(header().bell, spin, deadline, ready, [&](bool costly) {
      std::string missing;
      for (int peer = 0; peer < size(); ++peer) {
        if (costly && member(peer).presence == Presence::Here) {
          std::string end = obituary(peer, true);
          if (!end.empty()) throw Failure(Kind::PeerFailed, "init_process_group: " + end);
        }
        if (member(peer).presence < Presence::Here)
          missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
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
    heaps_.push_back(HeapView::open(member(peer).heap));
    char header_bytes[8];
    if (!try_read(peer, header_bytes, member(peer).base, sizeof header_bytes))
      header().reading_is_denied = true;
  }
  header().probed.fetch_add(1);
  header().bell.ring();
  await([&] { return header().probed.load() == header().size; });
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
  std::string end = obituary(rank, true);
  if (!end.empty()) throw Failure(Kind::PeerFailed, end);
  throw Failure(Kind::Backend, "cannot read the memory of " + title(rank) + ": " + why);
}

void Roster::leave(int rank) {
  auto here = Presence::Here;
  member(rank).presence.compare_exchange_strong(here, Presence::Left);
  header().bell.ring();
}

void Roster::fail(int rank, const std::string& why) {
  Member& me = member(rank);
  if (me.presence == Presence::Failed) return;
  // The end of a traceback says what happened.
  size_t length = std::min(why.size(), sizeof me.why);
  std::memcpy(me.why, why.data() + why.size() - length, length);
  me.why_length = uint32_t(length);
  me.presence = Presence::Failed;
  header().bell.ring();
}

std::string Roster::title(int rank) const {
  std::string text = "rank " + std::to_string(rank);
  if (!threads() && member(rank).heap.pid)
    text += " (pid " + std::to_string(member(rank).heap.pid) + ")";
  return text;
}

std::string Roster::obituary(int rank, bool ask_system) const {
  const Member& peer = member(rank);
  switch (peer.presence.load(std::memory_order_acquire)) {
    case Presence::Failed:
      return title(rank) + " failed: " + std::string(peer.why, peer.why_length);
    case Presence::Left:
      return title(rank) + " has finished and left its groups";
    case Presence::Here:
      if (ask_system && !threads() && has_ended(peer.heap))
        return title(rank) + " is gone: it was killed or crashed";
      return "";
    default:
      return "";
  }
}

void Roster::note(int rank, const std::string& text) { member(rank).note.write(text); }

std::vector<std::string> Roster::notes() const {
  std::vector<std::string> texts;
  for (int rank = 0; rank < size(); ++rank) texts.push_back(member(rank).note.read());
  return texts;
}

std::byte* Roster::reach(int rank, uint64_t offset) const {
  return threads() ? reinterpret_cast<std::byte*>(offset) : heaps_[rank]->at(offset);
}

}  // namespace phalanx
