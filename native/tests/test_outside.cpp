// Looking into heaps from outside: at sound ones, and at garbage, where the sanitizers look too.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <random>

#include "check.hpp"
#include "outside.hpp"
#include "ranks.hpp"

using namespace phalanx;

namespace {

std::string own_heap() { return "/proc/self/fd/" + std::to_string(Heap::mine()->address().fd); }

std::vector<char> read_file(const std::string& path, size_t bytes) {
  std::vector<char> data(bytes);
  int fd = ::open(path.c_str(), O_RDONLY);
  CHECK(fd >= 0 && ::pread(fd, data.data(), bytes, 0) == ssize_t(bytes));
  ::close(fd);
  return data;
}

}  // namespace

TEST(a_world_is_seen) {
  on_threads(3, [](Rank& self) {
    Call call;
    call.op = Op::Barrier;
    self.group.run(call);
    if (self.id() == 0) {
      HeapSeen seen = look_into(own_heap());
      CHECK(seen.address.pid == ::getpid());
      CHECK(seen.rosters.size() == 1 && seen.rosters[0].members.size() == 3);
      CHECK(seen.boards.size() == 1 && seen.boards[0].roster == seen.rosters[0].id);
      CHECK(seen.boards[0].name == "world" && seen.boards[0].seats[0].collectives == 1);
      CHECK(seen.boards[0].seats[0].history.back().op == Op::Barrier);
    }
    self.group.run(call);
  });
  HeapSeen after = look_into(own_heap());
  CHECK(after.rosters.empty() && after.boards.empty());
}

TEST(garbage_does_no_harm) {
  std::vector<char> whole;
  on_threads(2, [&](Rank& self) {
    if (self.id() == 0) whole = read_file(own_heap(), 1 << 20);
  });
  std::mt19937 random(7);
  int seen = 0;
  for (int attempt = 0; attempt < 300; ++attempt) {
    std::vector<char> data = whole;
    for (int hit = attempt % 2 ? 20 : 50'000; hit > 0; --hit)
      data[16 + random() % (data.size() - 16)] = char(random() % 3 ? random() : -1);
    if (attempt % 5 == 0) data.resize(random() % data.size());
    int fd = ::memfd_create("garbage", 0);
    CHECK(::write(fd, data.data(), data.size()) == ssize_t(data.size()));
    try {
      HeapSeen heap = look_into("/proc/self/fd/" + std::to_string(fd));
      seen += !heap.rosters.empty();
      for (auto& board : heap.boards)
        for (auto& seat : board.seats)
          for (auto& posting : seat.history) CHECK(!posting.describe().empty());
    } catch (const Failure&) {
    }
    ::close(fd);
  }
  CHECK(seen > 50);
}
