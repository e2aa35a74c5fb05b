// Recording what the ranks of this process do.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings_unlocked.hpp"
#include "kernels.hpp"
#include "trace.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

template <class Enum>
nb::list names(Enum last) {
  nb::list all;
  for (int i = 0; i <= int(last); ++i) all.append(nb::str(name(Enum(i))));
  return all;
}

}  // namespace

void bind_trace(nb::module_& m) {
  m.def("trace_start", &trace::start, nb::arg("directory"),
        "Record all operations of this process' ranks in files of this directory.");
  m.def("trace_stop", &trace::stop, nb::call_guard<Unlocked>(),
        "Record no more; returns what was lost, in words.");
  m.def("trace_is_on", [] { return trace::Tap::is_open(); }, "Whether operations are recorded.");
  m.def(
      "trace_range",
      [](std::shared_ptr<Roster> roster, int rank, const std::string& name) {
        auto file = trace::file_of(*roster, roster->checked(rank));
        return file ? file->begin_range(name) : trace::Range();
      },
      nb::arg("roster"), nb::arg("rank"), nb::arg("name"), "Begin a named stretch of a rank.");
  m.def(
      "trace_words",
      [] {
        nb::dict words;
        words["op"] = names(Op::Recv);
        words["dtype"] = names(DType(int(DType::Count) - 1));
        words["reduce"] = names(Reduce(int(Reduce::Count) - 1));
        words["state"] = names(Progress::Failed);
        return words;
      },
      "Names of the numbers in a trace, by field.");
  nb::class_<trace::Range>(m, "TraceRange", "A stretch of a rank's program that goes on.")
      .def("end", &trace::Range::end);
}
