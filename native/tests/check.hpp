// A test program in one header: TEST(name) { … } registers a case, CHECK… state what must hold.
// Include it in exactly one source file per program; it defines main. Arguments select cases by a
// part of their name.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(PHALANX_COVERAGE)
extern "C" void __sanitizer_cov_trace_pc() {}  // which only the fuzzers want to know
#endif

namespace check {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline std::atomic<int> failures{0};  // checks may run in any thread of a test

inline bool enroll(const char* name, void (*body)()) {
  cases().push_back({name, body});
  return true;
}

inline void fail(const char* file, int line, const std::string& what) {
  constexpr int shown = 20;  // a broken loop shall not print a million lines
  if (failures.fetch_add(1) < shown) std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <class A, class B>
std::string differ(const char* left, const char* right, const A& a, const B& b) {
  std::ostringstream out;
  out << left << " == " << right << " does not hold: " << a << " and " << b;
  return out.str();
}

inline int run(int argc, char** argv) {
  int failed = 0;
  int ran = 0;
  for (const Case& each : cases()) {
    bool chosen = argc <= 1;
    for (int i = 1; i < argc; ++i) chosen = chosen || std::strstr(each.name, argv[i]) != nullptr;
    if (!chosen) continue;
    failures = 0;
    try {
      each.body();
    } catch (const std::exception& error) {
      fail(each.name, 0, std::string("threw: ") + error.what());
    }
    ++ran;
    failed += failures != 0;
    std::printf("%s %s\n", failures != 0 ? "FAIL" : "ok  ", each.name);
    std::fflush(stdout);
  }
  std::printf("%d of %d cases failed\n", failed, ran);
  return failed != 0 || ran == 0;
}

}  // namespace check

#define TEST(name)                                                       \
  static void test_##name();                                             \
  static const bool enrolled_##name = check::enroll(#name, test_##name); \
  static void test_##name()

// Record a failure and go on.
#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) check::fail(__FILE__, __LINE__, #condition " does not hold"); \
  } while (false)

#define CHECK_EQ(left, right)                                                                 \
  do {                                                                                        \
    const auto& left_value = (left);                                                          \
    const auto& right_value = (right);                                                        \
    if (!(left_value == right_value))                                                         \
      check::fail(__FILE__, __LINE__, check::differ(#left, #right, left_value, right_value)); \
  } while (false)

#define CHECK_THROWS(expression, type)                                                  \
  do {                                                                                  \
    bool thrown = false;                                                                \
    try {                                                                               \
      expression;                                                                       \
    } catch (const type&) {                                                             \
      thrown = true;                                                                    \
    }                                                                                   \
    if (!thrown) check::fail(__FILE__, __LINE__, #expression " does not throw " #type); \
  } while (false)

// End the case: what follows makes no sense without this.
#define REQUIRE(condition)                                                            \
  do {                                                                                \
    if (!(condition))                                                                 \
      throw std::runtime_error(std::string(__FILE__ ":") + std::to_string(__LINE__) + \
                               ": " #condition);                                      \
  } while (false)

int main(int argc, char** argv) { return check::run(argc, argv); }
