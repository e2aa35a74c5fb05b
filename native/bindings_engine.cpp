// Python's view of the engine: rosters, groups, shared memory. Tensors are read through Python's
// own attribute protocol, so this builds without torch.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstring>
#include <unordered_map>

#include "lane.hpp"
#include "mailbox.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

// Objects that a finished call no longer needs. The thread that finishes it may not hold the
// interpreter's lock and must not wait for it, so they are put down here for the next one that
// does.
class Graveyard {
 public:
  static void bury(PyObject* object) {
    std::lock_guard lock(mutex());
    objects().push_back(object);
    full() = true;
  }
  static void empty() {
    if (!full().load(std::memory_order_relaxed)) return;
    std::vector<PyObject*> dead;
    {
      std::lock_guard lock(mutex());
      dead.swap(objects());
      full() = false;
    }
    for (PyObject* object : dead) Py_DECREF(object);
  }
  static std::shared_ptr<void> keep(nb::handle object) {
    return {object.inc_ref().ptr(), [](void* kept) { bury(static_cast<PyObject*>(kept)); }};
  }

 private:
  static std::mutex& mutex() {
    static auto& instance = *new std::mutex;
    return instance;
  }
  static std::vector<PyObject*>& objects() {
    static auto& instance = *new std::vector<PyObject*>;
    return instance;
  }
  static std::atomic<bool>& full() {
    static auto& instance = *new std::atomic<bool>;
    return instance;
  }
};

// Names of a tensor's attributes, and what Python tells us once: torch's element types.
struct Names {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* is_conj = PyUnicode_InternFromString("is_conj");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* stride = PyUnicode_InternFromString("stride");
  std::unordered_map<PyObject*, DType> dtypes;
};
Names& names() {
  static auto& instance = *new Names;
  return instance;
}

nb::object call(nb::handle object, PyObject* method) {
  PyObject* self = object.ptr();
  PyObject* result =
      PyObject_VectorcallMethod(method, &self, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (!result) throw nb::python_error();
  return nb::steal(result);
}

nb::object attribute(nb::handle object, PyObject* name) {
  PyObject* result = PyObject_GetAttr(object.ptr(), name);
  if (!result) throw nb::python_error();
  return nb::steal(result);
}

int64_t integer(PyObject* value) {
  int64_t number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) throw nb::python_error();
  return number;
}

DType dtype_of(nb::handle tensor) {
  nb::object dtype = attribute(tensor, names().dtype);
  auto known = names().dtypes.find(dtype.ptr());
  if (known == names().dtypes.end())
    throw nb::type_error(
        ("tensors of " + std::string(nb::str(dtype).c_str()) + " cannot be exchanged").c_str());
  return known->second;
}

// What the core needs to know of a tensor; its shape goes to `call` if one is given.
View view_of(nb::handle tensor, DType dtype, Call* described = nullptr) {
  View view;
  view.count = 1;
  nb::object shape = attribute(tensor, names().shape);
  Py_ssize_t ndim = PyTuple_GET_SIZE(shape.ptr());
  for (Py_ssize_t i = 0; i < ndim; ++i) {
    int64_t length = integer(PyTuple_GET_ITEM(shape.ptr(), i));
    view.count *= size_t(length);
    if (!described) continue;
    if (i < Py_ssize_t(std::size(described->shape)))
      described->shape[i] = length;
    else
      described->detail = mix(described->detail, uint64_t(length));
  }
  if (described) described->ndim = int(std::min<Py_ssize_t>(ndim, std::size(described->shape)));
  view.data = reinterpret_cast<std::byte*>(PyLong_AsVoidPtr(call(tensor, names().data_ptr).ptr()));
  bool complex = dtype == DType::C64 || dtype == DType::C128;
  if (complex && call(tensor, names().is_conj).ptr() == Py_True)
    throw nb::value_error("a conjugated view cannot be exchanged; pass tensor.resolve_conj()");
  bool dense = call(tensor, names().is_contiguous).ptr() == Py_True || view.count == 0;
  // Negated views come from complex tensors: they are strided or have a single element.
  if ((!dense || view.count == 1) && call(tensor, names().is_neg).ptr() == Py_True)
    throw nb::value_error("a negated view cannot be exchanged; pass tensor.resolve_neg()");
  if (dense) return view;
  auto layout = std::make_shared<Layout>();
  if (ndim > Layout::max_ndim)
    throw nb::value_error("a strided tensor may have at most 64 dimensions");
  nb::object stride = call(tensor, names().stride);
  layout->ndim = int(ndim);
  for (Py_ssize_t i = 0; i < ndim; ++i) {
    layout->shape[i] = integer(PyTuple_GET_ITEM(shape.ptr(), i));
    layout->stride[i] = integer(PyTuple_GET_ITEM(stride.ptr(), i));
  }
  view.layout = std::move(layout);
  return view;
}

// Where in the user's code a call was made: the innermost frame outside of this package.
class Sites {
 public:
  static void set_package(const std::string& directory) { instance().package_ = directory; }

  static void find(char (&site)[80]) {
    Sites& self = instance();
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      bool inside = self.inside(code);
      PyFrameObject* outer = inside ? PyFrame_GetBack(frame) : nullptr;
      if (!inside || !outer) self.write(site, code, frame);
      Py_DECREF(code);
      Py_DECREF(frame);
      frame = outer;
    }
  }

 private:
  struct Place {
    PyCodeObject* code;
    int at;
    bool operator==(const Place&) const = default;
  };
  struct Hash {
    size_t operator()(const Place& place) const {
      return mix(uint64_t(place.at), reinterpret_cast<uint64_t>(place.code));
    }
  };
  static Sites& instance() {
    static auto& instance = *new Sites;
    return instance;
  }

  bool inside(PyCodeObject* code) {
    auto known = code_.find(code);
    if (known != code_.end()) return known->second;
    if (code_.size() > 4096) forget();
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    if (!file) PyErr_Clear();
    bool inside = file && !package_.empty() && std::string_view(file).starts_with(package_);
    Py_INCREF(code);  // so that its address is not given to another
    return code_[code] = inside;
  }

  void write(char (&site)[80], PyCodeObject* code, PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
    int at = PyFrame_GetLasti(frame);
#else
    int at = PyFrame_GetLineNumber(frame);
#endif
    auto known = text_.find({code, at});
    if (known == text_.end()) {
      const char* file = PyUnicode_AsUTF8(code->co_filename);
      const char* function = PyUnicode_AsUTF8(code->co_name);
      if (!file || !function) PyErr_Clear();
      std::string_view base = file ? file : "?";
      base = base.substr(base.rfind('/') + 1);
      std::string text = std::string(base) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
      if (function && std::string_view(function) != "<module>")
        text += " in " + std::string(function);
      known = text_.emplace(Place{code, at}, text.substr(0, 79)).first;
    }
    std::memcpy(site, known->second.c_str(), known->second.size() + 1);
  }

  void forget() {
    for (auto& [code, inside] : code_) Py_DECREF(code);
    code_.clear();
    text_.clear();
  }

  std::string package_;
  std::unordered_map<PyCodeObject*, bool> code_;
  std::unordered_map<Place, std::string, Hash> text_;
};

void check_signals() {
  if (::getpid() != ::gettid()) return;  // signals are for the main thread
  nb::gil_scoped_acquire lock;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// An asynchronous call, as Python holds it.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual bool done() = 0;
  virtual std::exception_ptr error() = 0;
  virtual void wait(double timeout) = 0;
  virtual int source() { return -1; }
};

class PendingJob : public Pending {
 public:
  PendingJob(std::shared_ptr<Job> job, std::string title)
      : job_(std::move(job)), title_(std::move(title)) {}
  bool done() override { return job_->done(); }
  std::exception_ptr error() override { return job_->error(); }
  void wait(double timeout) override {
    Deadline patience = Deadline::in(timeout);
    while (!job_->wait(std::min(patience.at(), Clock::now() + kSlice))) {
      if (patience.passed())
        throw Failure(Kind::Timeout, title_ + ": not done when wait() timed out");
      check_interrupt();
    }
    if (job_->error()) std::rethrow_exception(job_->error());
  }

 private:
  std::shared_ptr<Job> job_;
  std::string title_;
};

class PendingDelivery : public Pending {
 public:
  PendingDelivery(std::shared_ptr<Mailbox> mailbox, std::shared_ptr<Delivery> delivery)
      : mailbox_(std::move(mailbox)), delivery_(std::move(delivery)) {}
  bool done() override {
    return delivery_->state.load(std::memory_order_acquire) != Delivery::State::Open;
  }
  std::exception_ptr error() override { return done() ? delivery_->error : nullptr; }
  void wait(double timeout) override { mailbox_->wait(*delivery_, Deadline::in(timeout)); }
  int source() override { return delivery_->source; }

 private:
  std::shared_ptr<Mailbox> mailbox_;
  std::shared_ptr<Delivery> delivery_;
};

// A rank's end of a group: the collectives in their lane and the mailbox beside it.
class Engine {
 public:
  Engine(std::shared_ptr<Roster> roster, std::vector<int> members, int rank,
         const std::string& name, double timeout, const std::string& ticket)
      : board_(ticket.empty() ? Board::create(roster, members)
                              : Board::open(roster, members, ticket)),
        group_(board_, rank, name, timeout),
        mailbox_(std::make_shared<Mailbox>(board_, rank, name)) {}

  ~Engine() { close(); }

  std::string ticket() const { return board_->ticket(); }
  void attend(bool creator) {
    board_->attend(group_.rank(), creator, group_.name(), Deadline::in(group_.timeout));
  }
  uint64_t sequence() const { return group_.sequence(); }
  double timeout() const { return group_.timeout; }
  void set_timeout(double timeout) { group_.timeout = timeout; }

  void abort(const std::string& why) { board_->break_up(Kind::PeerFailed, why); }
  // After the roster says that this rank has left or failed: lets waiters see it at once.
  void alarm() { board_->wake_all(); }
  void close() {
    nb::gil_scoped_release unlock;
    lane_.close();
    mailbox_->close();
    board_->leave(group_.rank());
  }

  nb::object barrier(double timeout, bool async) {
    Call call;
    call.op = Op::Barrier;
    return issue(std::move(call), timeout, async, nb::none());
  }
  nb::object all_reduce(nb::handle tensor, int reduce, double factor, double timeout, bool async) {
    Call call = reduction(Op::AllReduce, tensor, reduce, factor);
    call.inputs.push_back(view_of(tensor, call.dtype, &call));
    call.outputs = call.inputs;
    return issue(std::move(call), timeout, async, tensor);
  }
  nb::object reduce(nb::handle tensor, int root, int reduce, double factor, double timeout,
                    bool async) {
    Call call = reduction(Op::Reduce, tensor, reduce, factor);
    call.root = root;
    call.inputs.push_back(view_of(tensor, call.dtype, &call));
    if (root == group_.rank()) call.outputs = call.inputs;
    return issue(std::move(call), timeout, async, tensor);
  }
  nb::object broadcast(nb::handle tensor, int root, double timeout, bool async) {
    Call call = movement(Op::Broadcast, tensor, root);
    auto& side = root == group_.rank() ? call.inputs : call.outputs;
    side.push_back(view_of(tensor, call.dtype, &call));
    return issue(std::move(call), timeout, async, tensor);
  }
  nb::object all_gather(nb::handle outputs, nb::handle input, double timeout, bool async) {
    Call call = movement(Op::AllGather, input, -1);
    call.inputs.push_back(view_of(input, call.dtype, &call));
    call.outputs = views(outputs, call.dtype);
    expect(call.outputs[group_.rank()], call.inputs[0]);
    return issue(std::move(call), timeout, async, nb::make_tuple(outputs, input));
  }
  nb::object gather(nb::handle outputs, nb::handle input, int root, double timeout, bool async) {
    Call call = movement(Op::Gather, input, root);
    call.inputs.push_back(view_of(input, call.dtype, &call));
    if (root == group_.rank()) call.outputs = views(outputs, call.dtype);
    for (View& output : call.outputs) expect(output, call.inputs[0]);
    return issue(std::move(call), timeout, async, nb::make_tuple(outputs, input));
  }
  nb::object scatter(nb::handle output, nb::handle inputs, int root, double timeout, bool async) {
    Call call = movement(Op::Scatter, output, root);
    call.outputs.push_back(view_of(output, call.dtype, &call));
    if (root == group_.rank()) call.inputs = views(inputs, call.dtype);
    for (View& input : call.inputs) expect(input, call.outputs[0]);
    return issue(std::move(call), timeout, async, nb::make_tuple(output, inputs));
  }
  nb::object reduce_scatter(nb::handle output, nb::handle inputs, int reduce, double factor,
                            double timeout, bool async) {
    Call call = reduction(Op::ReduceScatter, output, reduce, factor);
    call.outputs.push_back(view_of(output, call.dtype, &call));
    call.inputs = views(inputs, call.dtype);
    expect(call.inputs[group_.rank()], call.outputs[0]);
    return issue(std::move(call), timeout, async, nb::make_tuple(output, inputs));
  }
  nb::object all_to_all(nb::handle outputs, nb::handle inputs, nb::handle like, double timeout,
                        bool async) {
    Call call = movement(Op::AllToAll, like, -1);
    view_of(like, call.dtype, &call);
    call.inputs = views(inputs, call.dtype);
    call.outputs = views(outputs, call.dtype);
    expect(call.outputs[group_.rank()], call.inputs[group_.rank()]);
    return issue(std::move(call), timeout, async, nb::make_tuple(outputs, inputs));
  }

  nb::object send(nb::handle tensor, int to, int tag, double timeout, bool async) {
    auto delivery = letter(Op::Send, tensor, to, tag, timeout);
    return dispatch(std::move(delivery), async, tensor);
  }
  nb::object recv(nb::handle tensor, int from, int tag, double timeout, bool async) {
    auto delivery = letter(Op::Recv, tensor, from, tag, timeout);
    return dispatch(std::move(delivery), async, tensor);
  }

 private:
  Call movement(Op op, nb::handle tensor, int root) {
    Call call;
    call.op = op;
    call.dtype = dtype_of(tensor);
    call.root = root;
    return call;
  }
  Call reduction(Op op, nb::handle tensor, int reduce, double factor) {
    Call call = movement(op, tensor, -1);
    call.reduce = Reduce(reduce);
    call.factor = factor;
    return call;
  }

  // What this rank gives to itself must fit; the board compares the rest.
  static void expect(const View& part, const View& other) {
    if (part.count != other.count)
      throw Failure(Kind::Invalid, "a part of " + std::to_string(part.count) +
                                       " elements does not fit one of " +
                                       std::to_string(other.count));
  }

  // One tensor per rank, or one tensor cut into as many equal parts.
  std::vector<View> views(nb::handle tensors, DType dtype) {
    std::vector<View> result;
    if (PyList_Check(tensors.ptr()) || PyTuple_Check(tensors.ptr())) {
      for (nb::handle tensor : tensors) {
        if (dtype_of(tensor) != dtype)
          throw nb::type_error("all tensors of an operation must have one dtype");
        result.push_back(view_of(tensor, dtype));
      }
      if (int(result.size()) != group_.size())
        throw nb::value_error("expected one tensor per rank");
      return result;
    }
    if (dtype_of(tensors) != dtype)
      throw nb::type_error("all tensors of an operation must have one dtype");
    View whole = view_of(tensors, dtype);
    if (whole.layout)
      throw nb::value_error("a tensor that is cut into equal parts must be contiguous");
    size_t part = whole.count / size_t(group_.size());
    if (part * size_t(group_.size()) != whole.count)
      throw nb::value_error("a tensor must have an equal part for each rank");
    for (int rank = 0; rank < group_.size(); ++rank)
      result.push_back({whole.data + size_t(rank) * part * item_size(dtype), part, nullptr});
    return result;
  }

  nb::object issue(Call&& call, double timeout, bool async, nb::handle keep) {
    Graveyard::empty();
    Sites::find(call.site);
    call.timeout = timeout;
    if (!async) {
      bool done;
      {
        nb::gil_scoped_release unlock;
        done = lane_.try_run([&] { group_.run(call); });
      }
      if (done) return nb::none();
    }
    std::string title = std::string(name(call.op)) + " on group '" + group_.name() + "'";
    // Owned by the job: the caller may be interrupted while it waits.
    auto body = [this, call = std::make_shared<Call>(std::move(call)),
                 kept = Graveyard::keep(keep)] { group_.run(*call); };
    std::shared_ptr<Pending> pending =
        std::make_shared<PendingJob>(lane_.submit(std::move(body)), std::move(title));
    if (async) return nb::cast(pending);
    {
      nb::gil_scoped_release unlock;
      pending->wait(-1);
    }
    return nb::none();
  }

  std::shared_ptr<Delivery> letter(Op op, nb::handle tensor, int peer, int tag, double timeout) {
    DType dtype = dtype_of(tensor);
    double limit = timeout < 0 ? group_.timeout : timeout;
    auto delivery = std::make_shared<Delivery>(op, peer, tag, dtype, view_of(tensor, dtype), limit);
    Sites::find(delivery->site);
    return delivery;
  }

  nb::object dispatch(std::shared_ptr<Delivery> delivery, bool async, nb::handle keep) {
    Graveyard::empty();
    if (async) delivery->keep = Graveyard::keep(keep);
    {
      nb::gil_scoped_release unlock;
      mailbox_->start(delivery, async);
      try {
        if (!async) mailbox_->wait(*delivery, delivery->deadline);
      } catch (...) {
        mailbox_->cancel(*delivery);
        throw;
      }
    }
    if (!async) return delivery->op == Op::Recv ? nb::cast(delivery->source) : nb::none();
    return nb::cast(
        std::shared_ptr<Pending>(std::make_shared<PendingDelivery>(mailbox_, std::move(delivery))));
  }

  std::shared_ptr<Board> board_;
  Group group_;
  std::shared_ptr<Mailbox> mailbox_;
  Lane lane_;  // ends first: its worker uses the others
};

}  // namespace

void bind_engine(nb::module_& m) {
  set_interrupt_check(check_signals);

  m.def(
      "configure",
      [](nb::dict dtypes, const std::string& package) {
        for (auto [dtype, code] : dtypes)
          names().dtypes[dtype.inc_ref().ptr()] = DType(nb::cast<int>(code));
        Sites::set_package(package);
      },
      nb::arg("dtypes"), nb::arg("package"),
      "Tell the core torch's element types and where this package lives.");

  m.def(
      "allocate",
      [](size_t bytes) {
        Block* block;
        {
          nb::gil_scoped_release unlock;
          block = new Block(Block::shared(bytes));
        }
        nb::capsule owner(block, [](void* held) noexcept { delete static_cast<Block*>(held); });
        return nb::ndarray<nb::numpy, uint8_t>(block->data(), {bytes}, owner);
      },
      nb::arg("bytes"), "Allocate zeroed bytes in this process' shared heap.");
  m.def(
      "in_heap",
      [](uintptr_t data, size_t bytes) {
        return Heap::mine()->contains(reinterpret_cast<void*>(data), bytes);
      },
      nb::arg("data"), nb::arg("bytes"), "Whether this memory is in this process' shared heap.");
  m.def(
      "heap_used", [] { return Heap::mine()->used(); },
      "Bytes allocated in this process' shared heap.");
  m.def("usable_cores", &usable_cores, "Cores that this process may run on.");

  nb::class_<Roster>(m, "Roster", "Who is in a world: one record per rank in shared memory.")
      .def_static("create", &Roster::create, nb::arg("size"), nb::arg("threads"))
      .def_static("open", &Roster::open, nb::arg("ticket"),
                  nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("ticket", &Roster::ticket)
      .def_prop_ro("threads", &Roster::threads)
      .def(
          "join",
          [](Roster& roster, int rank, double timeout) {
            roster.join(rank, Deadline::in(timeout));
          },
          nb::arg("rank"), nb::arg("timeout"), nb::call_guard<nb::gil_scoped_release>())
      .def("leave", &Roster::leave, nb::arg("rank"))
      .def("fail", &Roster::fail, nb::arg("rank"), nb::arg("why"))
      .def("obituary", &Roster::obituary, nb::arg("rank"), nb::arg("ask_system"));

  nb::class_<Pending>(m, "Pending", "An asynchronous operation.")
      .def("done", &Pending::done)
      .def("wait", &Pending::wait, nb::arg("timeout"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "check",
          [](Pending& pending) {
            if (auto error = pending.error()) std::rethrow_exception(error);
          },
          "Raise what made it fail, if it has failed.")
      .def("source", &Pending::source);

  nb::class_<Engine>(m, "Group", "One rank's end of a group.")
      .def(nb::init<std::shared_ptr<Roster>, std::vector<int>, int, const std::string&, double,
                    const std::string&>(),
           nb::arg("roster"), nb::arg("members"), nb::arg("rank"), nb::arg("name"),
           nb::arg("timeout"), nb::arg("ticket"))
      .def_prop_ro("ticket", &Engine::ticket)
      .def_prop_ro("sequence", &Engine::sequence)
      .def_prop_rw("timeout", &Engine::timeout, &Engine::set_timeout)
      .def("attend", &Engine::attend, nb::arg("creator"), nb::call_guard<nb::gil_scoped_release>(),
           "Say that this rank is there; the creator returns when all are.")
      .def("abort", &Engine::abort, nb::arg("why"))
      .def("alarm", &Engine::alarm)
      .def("close", &Engine::close)
      .def("barrier", &Engine::barrier)
      .def("all_reduce", &Engine::all_reduce)
      .def("reduce", &Engine::reduce)
      .def("broadcast", &Engine::broadcast)
      .def("all_gather", &Engine::all_gather)
      .def("gather", &Engine::gather, nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
      .def("scatter", &Engine::scatter, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
           nb::arg())
      .def("reduce_scatter", &Engine::reduce_scatter)
      .def("all_to_all", &Engine::all_to_all)
      .def("send", &Engine::send)
      .def("recv", &Engine::recv);
}
