// Recording: what is in the files, while ranks write to them and after.
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "ranks.hpp"
#include "trace.hpp"

using namespace phalanx;
namespace fs = std::filesystem;

namespace {

struct Directory {
  fs::path path;
  Directory() {
    char name[] = "/tmp/phalanx-trace-XXXXXX";
    path = ::mkdtemp(name);
  }
  ~Directory() { fs::remove_all(path); }
};

std::vector<trace::OperationSlot> operations(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  std::vector<trace::OperationSlot> found;
  for (size_t at = trace::kHeadBytes; at + trace::kSlotBytes <= bytes.size();
       at += trace::kSlotBytes) {
    trace::OperationSlot slot;
    std::memcpy(static_cast<void*>(&slot), bytes.data() + at, sizeof slot);
    if (slot.kind == trace::Kind::Nothing) break;
    if (slot.kind == trace::Kind::Operation) found.push_back(slot);
  }
  return found;
}

std::vector<fs::path> files(const Directory& directory) {
  std::vector<fs::path> paths;
  for (auto& entry : fs::directory_iterator(directory.path)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  return paths;
}

void barrier(Rank& rank) {
  Call call;
  rank.group.run(call);
}

void pass_on(Rank& rank, int value) {
  auto deliver = [&](Op op, int peer, int32_t& data) {
    View view{reinterpret_cast<std::byte*>(&data), 1, nullptr};
    auto delivery = std::make_shared<Delivery>(op, peer, 0, DType::I32, view, -1, 20);
    rank.mailbox.start(delivery, false);
    rank.mailbox.wait(*delivery, delivery->deadline);
  };
  int32_t data = value;
  if (rank.id() == 0) deliver(Op::Send, 1, data);
  if (rank.id() == 1) deliver(Op::Recv, 0, data);
}

}  // namespace

TEST(collectives_and_messages_of_threads_share_a_file_per_rank) {
  Directory directory;
  trace::start(directory.path);
  constexpr int kRounds = 5000;  // more than a window has room for
  on_threads(2, [](Rank& rank) {
    std::thread talker([&] {
      for (int i = 0; i < kRounds; ++i) pass_on(rank, i);
    });
    for (int i = 0; i < kRounds; ++i) barrier(rank);
    talker.join();
  });
  CHECK_EQ(trace::stop().size(), 0u);
  auto paths = files(directory);
  CHECK_EQ(paths.size(), 2u);
  for (auto& path : paths) {
    auto found = operations(path);
    CHECK_EQ(found.size(), 2u * kRounds);
    uint64_t collectives = 0, messages = 0;
    for (auto& slot : found) {
      CHECK_EQ(slot.sequence, slot.op == Op::Barrier ? ++collectives : ++messages);
      CHECK(slot.progress == Progress::Done);
      CHECK(slot.finished_ns >= slot.posted_ns);
    }
  }
}

TEST(processes_write_files_of_their_own) {
  Directory directory;
  trace::start(directory.path);
  on_processes(3, [](Rank& rank) {
    for (int i = 0; i < 10; ++i) barrier(rank);
  });
  CHECK_EQ(trace::stop().size(), 0u);
  auto paths = files(directory);
  CHECK_EQ(paths.size(), 3u);
  for (auto& path : paths) CHECK_EQ(operations(path).size(), 10u);
}

TEST(a_recording_can_end_and_another_begin_at_any_time) {
  Directory first, second;
  std::atomic<bool> over = false;
  std::thread switcher([&] {
    for (int round = 0; !over && round < 100; ++round) {
      trace::start(first.path);
      std::this_thread::yield();
      trace::stop();
      trace::start(second.path);
      std::this_thread::yield();
      trace::stop();
    }
  });
  on_threads(2, [](Rank& rank) {
    for (int i = 0; i < 2000; ++i) barrier(rank);
  });
  over = true;
  switcher.join();
  for (auto* directory : {&first, &second})
    for (auto& path : files(*directory))
      for (auto& slot : operations(path)) CHECK(slot.finished_ns >= slot.posted_ns);
}

TEST(a_directory_that_is_gone_is_told_and_hinders_nobody) {
  {
    Directory directory;
    trace::start(directory.path);
  }
  on_threads(2, [](Rank& rank) { barrier(rank); });
  auto losses = trace::stop();
  CHECK_EQ(losses.size(), 2u);
  for (auto& loss : losses) CHECK(loss.find("1 operations are not recorded") != std::string::npos);
}
