// A fuzzer in one file, guided by coverage, for GCC, which has the instrumentation and no fuzzer. A
// harness is what libFuzzer takes as well: LLVMFuzzerTestOneInput.
//
//   fuzz_wire FILE|FOLDER...                try these inputs once
//   fuzz_wire --seconds=20 FILE|FOLDER...   then go on with changed ones; --seed=7 --found=FOLDER
//
// An input after which something new was reached is kept and changed further. The one that ends the
// program, or takes too long, is left in the folder `found` as crash-<number>.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" void __sanitizer_set_death_callback(void (*)()) __attribute__((weak));

namespace {

using Input = std::vector<uint8_t>;

constexpr size_t kPlaces = 1 << 14;
constexpr size_t kLongest = 4096;
constexpr unsigned kPatience = 20;  // seconds for one input

// How often each place was passed. Relaxed, and lost counts do not matter: a server's thread is
// watched as well.
std::array<std::atomic<uint8_t>, kPlaces> passed;
std::array<uint8_t, kPlaces> known;  // the orders of magnitude that have been seen

Input current;
char found_path[4096];

void keep_current() {
  int fd = ::open(found_path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd < 0) return;
  static_cast<void>(!::write(fd, current.data(), current.size()));
  ::close(fd);
  const char text[] = "the input that did this is in ";
  static_cast<void>(!::write(2, text, sizeof text - 1));
  static_cast<void>(!::write(2, found_path, std::strlen(found_path)));
  static_cast<void>(!::write(2, "\n", 1));
}

void die(int) {
  keep_current();
  ::_exit(1);
}

bool reach_something_new() {
  bool is_new = false;
  for (size_t i = 0; i < kPlaces; ++i) {
    const uint8_t count = passed[i].load(std::memory_order_relaxed);
    if (!count) continue;
    passed[i].store(0, std::memory_order_relaxed);
    const auto order = uint8_t(1u << std::min(7, 31 - __builtin_clz(count)));
    is_new |= !(known[i] & order);
    known[i] |= order;
  }
  return is_new;
}

bool run(const Input& input) {
  current = input;
  ::alarm(kPatience);
  LLVMFuzzerTestOneInput(current.data(), current.size());
  ::alarm(0);
  return reach_something_new();
}

class Changes {
 public:
  explicit Changes(uint64_t seed) : random_(seed) {}
  size_t below(size_t count) { return count ? size_t(random_() % count) : 0; }

  Input change(const std::vector<Input>& corpus) {
    Input input = corpus[below(corpus.size())];
    for (size_t times = 1 + below(4); times > 0; --times) once(input, corpus);
    if (input.size() > kLongest) input.resize(kLongest);
    return input;
  }

 private:
  void once(Input& input, const std::vector<Input>& corpus) {
    if (input.empty()) input.push_back(uint8_t(random_()));
    const size_t at = below(input.size() + 1), rest = input.size() - at;
    switch (below(8)) {
      case 0:
        if (rest) input[at] ^= uint8_t(1u << below(8));
        break;
      case 1:
        if (rest) input[at] = uint8_t(random_());
        break;
      case 2:
        input.insert(input.begin() + long(at), 1 + below(8), uint8_t(random_()));
        break;
      case 3:
        input.erase(input.begin() + long(at), input.begin() + long(at + below(rest + 1)));
        break;
      case 4: {  // a number at the edge of something
        static constexpr uint64_t edges[] = {0,         1,          7,          255,
                                             65535,     0x7fffffff, 0x80000000, 0xffffffff,
                                             INT64_MAX, 1ull << 63, UINT64_MAX, 64 << 20};
        uint64_t value = edges[below(std::size(edges))] + below(3) - 1;
        std::memcpy(input.data() + at, &value, std::min(rest, size_t{1} << below(4)));
        break;
      }
      case 5: {  // a number that is a little more or less
        uint32_t value;
        if (rest < sizeof value) break;
        std::memcpy(&value, input.data() + at, sizeof value);
        value += uint32_t(below(33)) - 16;
        std::memcpy(input.data() + at, &value, sizeof value);
        break;
      }
      case 6: {  // a piece of another one
        const Input& other = corpus[below(corpus.size())];
        const size_t from = below(other.size() + 1), length = below(other.size() - from + 1);
        const Input piece(other.begin() + long(from), other.begin() + long(from + length));
        if (below(2)) input.resize(at);
        input.insert(input.begin() + long(std::min(at, input.size())), piece.begin(), piece.end());
        break;
      }
      default: {  // a piece of itself
        const size_t from = below(input.size() + 1);
        std::memmove(input.data() + at, input.data() + from,
                     std::min({rest, input.size() - from, 1 + below(16)}));
      }
    }
  }

  std::mt19937_64 random_;
};

void add_inputs(const std::filesystem::path& path, std::vector<Input>& corpus) {
  if (std::filesystem::is_directory(path)) {
    std::vector<std::filesystem::path> files;
    for (auto& entry : std::filesystem::directory_iterator(path)) files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    for (auto& file : files) add_inputs(file, corpus);
    return;
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    std::exit(2);
  }
  corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

}  // namespace

// Called at every branch of what is instrumented, which this file is not.
extern "C" void __sanitizer_cov_trace_pc() {
  const auto here = uintptr_t(__builtin_return_address(0)) - uintptr_t(&LLVMFuzzerTestOneInput);
  auto& count = passed[(here ^ here >> 16) % kPlaces];
  const uint8_t before = count.load(std::memory_order_relaxed);
  if (before < UINT8_MAX) count.store(uint8_t(before + 1), std::memory_order_relaxed);
}

int main(int argc, char** argv) {
  double seconds = 0;
  uint64_t seed = 1;
  std::string found = ".";
  std::vector<Input> corpus;
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    auto value = [&](const char* name) -> const char* {
      return word.starts_with(name) ? argv[i] + std::strlen(name) : nullptr;
    };
    if (auto* text = value("--seconds="))
      seconds = std::atof(text);
    else if (auto* text = value("--seed="))
      seed = std::strtoull(text, nullptr, 10);
    else if (auto* text = value("--found="))
      found = text;
    else
      add_inputs(word, corpus);
  }
  std::snprintf(found_path, sizeof found_path, "%s/crash-%d", found.c_str(), int(::getpid()));
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(keep_current);
  std::signal(SIGABRT, die);
  std::signal(SIGALRM, die);
  if (corpus.empty()) corpus.emplace_back();
  const size_t given = corpus.size();
  for (size_t i = 0; i < given; ++i) run(corpus[i]);
  Changes changes(seed);
  size_t runs = given;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (; std::chrono::steady_clock::now() < end; ++runs)
    if (run(changes.change(corpus))) corpus.push_back(current);
  std::printf("%zu inputs, %zu of them reached something new\n", runs, corpus.size() - given);
  return 0;
}
