#include "outside.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "deadlock.hpp"
#include "failure.hpp"
#include "region.hpp"
#include "report.hpp"

namespace phalanx {
namespace {

constexpr int kLooks = 8;             // at something that changes, until two in a row agree
constexpr uint32_t kMostSeen = 4096;  // ranks of a world; more than that is garbage

class File {
 public:
  explicit File(const std::string& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    struct stat info{};
    if (fd_ < 0 || ::fstat(fd_, &info) != 0) {
      std::string why = std::strerror(errno);
      if (fd_ >= 0) ::close(fd_);
      throw Failure(Kind::Backend, "cannot look into " + path + ": " + why);
    }
    size_ = uint64_t(info.st_size);
  }
  ~File() { ::close(fd_); }
  File(const File&) = delete;

  bool read(uint64_t offset, void* into, size_t bytes) const {
    if (offset > size_ || bytes > size_ - offset) return false;
    auto* at = static_cast<std::byte*>(into);
    while (bytes > 0) {
      ssize_t got = ::pread(fd_, at, bytes, off_t(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      at += got;
      offset += uint64_t(got);
      bytes -= size_t(got);
    }
    return true;
  }

 private:
  int fd_;
  uint64_t size_ = 0;
};

// A copy of some structures as they stood in the file.
template <class T>
class Copy {
 public:
  explicit Copy(size_t count = 1) : bytes_(count * sizeof(T)), memory_(bytes_ / 64 + 1) {}
  bool take(const File& file, uint64_t offset) { return file.read(offset, memory_.data(), bytes_); }
  // Until it is the same twice in a row: then nothing in it was being written.
  bool take_stable(const File& file, uint64_t offset) {
    if (!take(file, offset)) return false;
    for (int look = 0; look < kLooks; ++look) {
      std::vector<Chunk> before = memory_;
      if (!take(file, offset)) return false;
      if (std::memcmp(before.data(), memory_.data(), bytes_) == 0) break;
    }
    return true;
  }
  const T* data() const { return reinterpret_cast<const T*>(memory_.data()); }
  const T& operator*() const { return *data(); }
  const T* operator->() const { return data(); }

 private:
  struct alignas(64) Chunk {
    std::byte bytes[64];
  };
  size_t bytes_;
  std::vector<Chunk> memory_;
};

template <size_t size>
std::string text_of(const char (&text)[size], size_t length = size) {
  return {text, ::strnlen(text, std::min(length, size))};
}

MemberSeen see(const Member& member) {
  MemberSeen seen{member.presence,
                  is_set(member.remote),
                  member.heap,
                  member.thread,
                  member.signal,
                  member.ended_ns,
                  text_of(member.host),
                  "",
                  {}};
  if (seen.presence == Presence::Failed) seen.why = text_of(member.why, member.why_length);
  for (const Wait& wait : member.waits)
    if (WaitFacts facts; is_set(wait.taken) && wait.facts.read(facts) && make_sound(facts))
      seen.waits.push_back(facts);
  return seen;
}

// Found twice in a row, or it was read while it changed.
std::string deadlock_in(const Copy<Member>& first, const Copy<Member>& second, size_t size) {
  auto before = find_deadlock({first.data(), size}), after = find_deadlock({second.data(), size});
  bool same = std::equal(before.begin(), before.end(), after.begin(), after.end(),
                         [](const BlockedWait& a, const BlockedWait& b) {
                           return a.rank == b.rank && a.facts.since_ns == b.facts.since_ns;
                         });
  if (after.empty() || !same) return "";
  return deadlock_report(size, after);
}

bool look_at_roster(const File& file, const DirectoryEntry& entry, RosterSeen& seen) {
  const uint64_t base = entry.offset + kRegionHead;
  Copy<RosterHeader> header;
  if (!header.take(file, base)) return false;
  const uint32_t size = header->size;
  const uint64_t end = kRegionHead + sizeof(RosterHeader) + uint64_t(size) * sizeof(Member);
  if (size == 0 || size > kMostSeen || end > entry.bytes) return false;
  seen.id = entry.id;
  seen.threads = header->threads != 0;
  seen.started_ns = header->started_ns;
  Copy<Member> members(size), again(size);
  if (!members.take_stable(file, base + sizeof(RosterHeader)) ||
      !again.take_stable(file, base + sizeof(RosterHeader)))
    return false;
  for (size_t rank = 0; rank < size; ++rank) seen.members.push_back(see(again.data()[rank]));
  seen.deadlock = deadlock_in(members, again, size);
  return true;
}

SeatSeen see(const Seat& seat) {
  uint32_t even = seat.lines[0].clock, odd = seat.lines[1].clock;
  SeatSeen seen{is_set(seat.present), is_set(seat.left),   int32_t(even - odd) > 0 ? even : odd,
                seat.newest,          seat.newest_message, history_of(seat)};
  std::erase_if(seen.history, [](Posting& posting) { return !make_sound(posting); });
  return seen;
}

bool look_at_board(const File& file, const DirectoryEntry& entry, BoardSeen& seen) {
  const uint64_t base = entry.offset + kRegionHead;
  Copy<BoardHeader> header;
  if (!header.take(file, base)) return false;
  const uint32_t size = header->size;
  if (size == 0 || size > kMostSeen) return false;
  const BoardLayout layout(size);
  Copy<int32_t> members(size);
  if (kRegionHead + layout.end > entry.bytes || !members.take(file, base + layout.members))
    return false;
  seen.id = entry.id;
  seen.roster = header->roster;
  seen.name = text_of(header->name);
  if (header->broken == 2) seen.broken = text_of(header->why, header->why_length);
  for (uint32_t rank = 0; rank < size; ++rank) {
    int member = members.data()[rank];
    Copy<Seat> seat;
    if (member < 0 || member >= int(kMostSeen) ||
        !seat.take(file, base + layout.seats + rank * sizeof(Seat)))
      return false;
    seen.members.push_back(member);
    seen.seats.push_back(see(*seat));
  }
  return true;
}

}  // namespace

HeapSeen look_into(const std::string& path) {
  File file(path);
  Copy<HeapHeader> header;
  // Heaps of all versions begin alike.
  struct Beginning {
    char magic[sizeof HeapHeader::magic];
    uint64_t layout;
  };
  Copy<Beginning> beginning;
  if (!beginning.take(file, 0) ||
      !reinterpret_cast<const HeapHeader*>(beginning.data())->is_valid())
    throw Failure(Kind::Invalid, path + " is not the heap of a rank");
  if (beginning->layout != kLayout || !header.take(file, 0))
    throw Failure(Kind::Backend, path +
                                     " belongs to another version of Phalanx: look at it with the "
                                     "version that its process runs");
  HeapSeen seen{header->address, header->unlisted, {}, {}};
  for (const DirectoryEntry& entry : header->entries) {
    if (entry.id == 0) continue;
    // A region that has ended meanwhile has another id, before or after it was read.
    auto lives = [&] {
      Copy<RegionHead> head;
      return head.take(file, entry.offset) && head->id == entry.id;
    };
    auto look = [&](auto& list, auto&& look_at) {
      auto& found = list.emplace_back();
      if (!lives() || !look_at(file, entry, found) || !lives()) list.pop_back();
    };
    if (entry.content == Content::Roster) look(seen.rosters, look_at_roster);
    if (entry.content == Content::Board) look(seen.boards, look_at_board);
  }
  return seen;
}

}  // namespace phalanx
