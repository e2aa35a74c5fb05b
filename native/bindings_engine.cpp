// Python's view of the engine: rosters, groups, shared memory. Tensors are read through Python's
// own attribute protocol, so this builds without torch.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include "bindings_graveyard.hpp"
#include "bindings_pending.hpp"
#include "bindings_posting.hpp"
#include "bindings_site.hpp"
#include "bindings_tensor.hpp"
#include "bindings_unlocked.hpp"
#include "copies.hpp"
#include "lane.hpp"
#include "mailbox.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

PyObject* shapes_observer = nullptr;

void tell_of_shapes(int rank, const std::string& site, const std::string& what) {
  nb::gil_scoped_acquire lock;
  try {
    nb::handle observer(shapes_observer);
    if (observer) observer(rank, as_str(site), as_str(what));
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("phalanx._native.set_shapes_observer");
  }
}

void check_signals() {
  if (::getpid() != ::gettid()) return;  // signals are for the main thread
  nb::gil_scoped_acquire lock;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// The place of this thread's next call in a batch of calls that belong together.
thread_local uint16_t batch_part = 0, batch_parts = 0;

// What this thread's calls are part of, which must be the same on all ranks; digest 0 for nothing.
struct Whole {
  uint64_t digest = 0, number = 0;
  std::string what, site;
};
thread_local Whole whole;

// Native waits on this thread, one within the other if signal handlers call.
thread_local int calls_under_way = 0;

struct UnderWay {
  UnderWay() { ++calls_under_way; }
  ~UnderWay() { --calls_under_way; }
};

// Up to this many bytes a call takes less time than it takes to begin it on another thread and
// come back, and so is left to those who wait for it.
constexpr size_t kShort = 128 << 10;

// A rank's end of a group: the collectives in their lane and the mailbox beside it. Made by
// make_here, so that a forked child leaves all of it alone.
class Engine {
 public:
  Engine(std::shared_ptr<Roster> roster, std::vector<int> members, int rank,
         const std::string& name, double timeout, const std::string& ticket)
      : site_(Sites::find()),
        board_(ticket.empty() ? Board::create(roster, members, name, site_)
                              : Board::open(roster, members, ticket, rank, site_)),
        group_(board_, rank, name, timeout),
        mailbox_(std::make_shared<Mailbox>(board_, rank, name)),
        lane_(std::make_shared<Lane>([board = board_, member = board_->world_rank(rank)](int by) {
          board->roster().change(member, &Member::lanes, by);
        })) {}

  ~Engine() {
    try {
      close();
    } catch (nb::python_error& error) {  // a signal handler's
      error.discard_as_unraisable("phalanx._native.Group");
    }
  }

  std::string ticket() const { return board_->ticket(); }
  void attend(bool creator) {
    Unlocked unlock;
    board_->attend(group_.rank(), creator, site_, group_.timeout);
  }
  std::string describe(int rank) const {
    std::string end = board_->obituary(board_->checked(rank), true);
    return end.empty() ? describe_absent(*board_, {&rank, 1}).substr(3) : end;  // "\n  rank ..."
  }

  void measure(bool compares, bool records) {
    group_.compares = compares;
    group_.records = records;
  }
  nb::list history() const { return as_list(board_->seat(group_.rank())); }
  uint64_t sequence() const { return group_.sequence(); }
  double timeout() const { return group_.timeout; }
  void set_timeout(double timeout) { group_.timeout = timeout; }

  void abort(const std::string& why, const std::string& error) {
    check_own();
    board_->break_up(error == "CollectiveMismatch" ? Kind::Mismatch
                     : error == "Deadlock"         ? Kind::Deadlock
                     : error == "DistTimeout"      ? Kind::Timeout
                                                   : Kind::PeerFailed,
                     why);
  }
  // After the roster says that this rank has left or failed: lets waiters see it at once.
  void alarm() {
    if (origin_.is_here()) board_->wake_all();
  }
  void close() {
    if (!origin_.is_here()) return;  // a child's copy has nothing to end
    Unlocked unlock;
    // Called by a signal handler on top of a call that waits: that call would never end.
    if (calls_under_way > 0)
      board_->break_up(Kind::PeerFailed, "rank " + std::to_string(group_.rank()) +
                                             " has destroyed the group '" + group_.name() +
                                             "' in the middle of an operation");
    await_lane();
    lane_->close(calls_under_way == 0);
    mailbox_->close();
    board_->leave(group_.rank());
  }

  nb::object barrier(double timeout, bool async) {
    Call call;
    call.op = Op::Barrier;
    return issue(std::move(call), timeout, async, nb::none());
  }
  nb::object all_reduce(nb::handle tensor, int reduce, double factor, double timeout, bool async) {
    auto [call, view] = about(Op::AllReduce, tensor, -1, reduce, factor);
    call.inputs.push_back(view);
    call.outputs.push_back(std::move(view));
    return issue(std::move(call), timeout, async, tensor);
  }
  // A method of its own: an argument that may be None would make the other one's calls slower.
  nb::object all_reduce_measured(nb::handle tensor, int reduce, double factor, double timeout,
                                 bool async, nb::handle squares) {
    auto [call, view] = about(Op::AllReduce, tensor, -1, reduce, factor);
    call.inputs.push_back(view);
    call.outputs.push_back(std::move(view));
    call.squares = place_for_squares(squares, call.dtype);
    return issue(std::move(call), timeout, async, tensor, squares);
  }
  nb::object reduce(nb::handle tensor, int root, int reduce, double factor, double timeout,
                    bool async) {
    auto [call, view] = about(Op::Reduce, tensor, board_->checked(root), reduce, factor);
    call.inputs.push_back(view);
    if (root == group_.rank()) call.outputs.push_back(std::move(view));
    return issue(std::move(call), timeout, async, tensor);
  }
  nb::object broadcast(nb::handle tensor, int root, double timeout, bool async) {
    auto [call, view] = about(Op::Broadcast, tensor, board_->checked(root));
    (root == group_.rank() ? call.inputs : call.outputs).push_back(std::move(view));
    return issue(std::move(call), timeout, async, tensor);
  }
  nb::object all_gather(nb::handle outputs, nb::handle input, double timeout, bool async) {
    auto [call, view] = about(Op::AllGather, input, -1);
    call.inputs.push_back(std::move(view));
    call.outputs = views(outputs, call.dtype);
    expect(call.outputs[group_.rank()], call.inputs[0]);
    return issue(std::move(call), timeout, async, outputs, input);
  }
  nb::object gather(nb::handle outputs, nb::handle input, int root, double timeout, bool async) {
    auto [call, view] = about(Op::Gather, input, board_->checked(root));
    call.inputs.push_back(std::move(view));
    if (root == group_.rank()) call.outputs = views(outputs, call.dtype);
    for (View& output : call.outputs) expect(output, call.inputs[0]);
    return issue(std::move(call), timeout, async, outputs, input);
  }
  nb::object scatter(nb::handle output, nb::handle inputs, int root, double timeout, bool async) {
    auto [call, view] = about(Op::Scatter, output, board_->checked(root));
    call.outputs.push_back(std::move(view));
    if (root == group_.rank()) call.inputs = views(inputs, call.dtype);
    for (View& input : call.inputs) expect(input, call.outputs[0]);
    return issue(std::move(call), timeout, async, output, inputs);
  }
  nb::object reduce_scatter(nb::handle output, nb::handle inputs, int reduce, double factor,
                            double timeout, bool async) {
    auto [call, view] = about(Op::ReduceScatter, output, -1, reduce, factor);
    call.outputs.push_back(std::move(view));
    call.inputs = views(inputs, call.dtype);
    expect(call.inputs[group_.rank()], call.outputs[0]);
    return issue(std::move(call), timeout, async, output, inputs);
  }
  // `like` is what is shown of the call to the others.
  nb::object all_to_all(nb::handle outputs, nb::handle inputs, nb::handle like, double timeout,
                        bool async) {
    Call call = about(Op::AllToAll, like, -1).first;
    call.inputs = views(inputs, call.dtype);
    call.outputs = views(outputs, call.dtype);
    expect(call.outputs[group_.rank()], call.inputs[group_.rank()]);
    return issue(std::move(call), timeout, async, outputs, inputs);
  }

  // A copy on this rank alone, in its turn among the collectives.
  nb::object copy_in_turn(nb::handle to, nb::handle from, bool async) {
    check_own();
    Graveyard::empty();
    auto [call, target] = about(Op::AllReduce, to, -1);  // what a report would call it
    const Look source(from);
    const Transfer transfer{call.dtype, target, source.view()};
    if (source.dtype != call.dtype || source.count != target.count)
      throw nb::value_error("copy_in_turn: dtype and number of elements must be the same");
    const auto run = [transfer] { copy_all({&transfer, 1}, nullptr); };
    bool done = false;
    if (!async) {
      Unlocked unlock;
      UnderWay call_under_way;
      done = lane_->try_run(run);
    }
    if (done) return nb::none();
    Sites::find(call.site, call.api, size_t(call.op));
    auto body = [run, alive = Graveyard::keep(nb::make_tuple(to, from))](bool) { run(); };
    const bool at_once = target.count * item_size(call.dtype) > kShort;
    return pending(lane_->submit(std::move(body), at_once), call, async);
  }

  nb::object send(nb::handle tensor, int to, int tag, double timeout, bool async) {
    return deliver(Op::Send, tensor, board_->checked(to), tag, timeout, async);
  }
  nb::object recv(nb::handle tensor, int from, int tag, double timeout, bool async) {
    // -1: from any rank
    return deliver(Op::Recv, tensor, from == -1 ? from : board_->checked(from), tag, timeout,
                   async);
  }

 private:
  // The beginnings of a call: what its posting says, and the tensor that says it.
  static std::pair<Call, View> about(Op op, nb::handle tensor, int root, int reduce = 0,
                                     double factor = 1) {
    if (reduce < 0 || reduce >= int(Reduce::Count))
      throw Failure(Kind::Invalid, "unknown reduction " + std::to_string(reduce));
    Look look(tensor);
    std::pair<Call, View> result{Call{}, look.view()};
    Call& call = result.first;
    call.op = op;
    call.dtype = look.dtype;
    call.root = root;
    call.reduce = Reduce(reduce);
    call.factor = factor;
    call.count = look.count;
    set_shape(call, look);
    return result;
  }

  template <class Described>
  static void set_shape(Described& described, const Look& look) {
    constexpr int kRoom = int(std::extent_v<decltype(described.shape)>);
    described.ndim = std::min(look.shown.ndim, kRoom);
    std::copy_n(look.shown.shape, described.ndim, described.shape);
    for (int i = kRoom; i < look.shown.ndim; ++i)
      described.more_shape = uint32_t(mix(described.more_shape, uint64_t(look.shown.shape[i]))) | 1;
  }

  static double* place_for_squares(nb::handle squares, DType dtype) {
    if (!measurable(dtype))
      throw Failure(Kind::Invalid,
                    std::string("all_reduce: squares: a sum of squares is not defined for ") +
                        name(dtype) + " (floating and complex dtypes have one)");
    Look look(squares);
    if (!look.fault && (look.dtype != DType::F64 || look.count != 1))
      throw nb::value_error("all_reduce: squares must be a float64 tensor of one element");
    return reinterpret_cast<double*>(look.view().data);
  }

  // Wait for what this rank has issued. That may be part of a deadlock, which ends it.
  void await_lane() {
    Waiter waiter(board_->roster(), board_->world_rank(group_.rank()));
    const int64_t started = now_ns();
    for (;;) {
      WaitFacts facts =
          wait_facts(Op::Barrier, group_.name(), "destroy_process_group", site_.c_str(), started);
      facts.own = facts.blocked = true;
      if (calls_under_way > 0 || lane_->drained(Clock::now() + kSlice)) return;
      waiter.update(facts);
    }
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
    const size_t size = size_t(group_.size());
    std::vector<View> result;
    result.reserve(size);
    auto checked = [&](nb::handle tensor) {
      Look look(tensor);
      if (!look.fault && look.dtype != dtype)
        throw nb::type_error("all tensors of an operation must have one dtype");
      return look.view();
    };
    if (PyList_Check(tensors.ptr()) || PyTuple_Check(tensors.ptr())) {
      for (nb::handle tensor : tensors) result.push_back(checked(tensor));
      if (result.size() != size) throw nb::value_error("expected one tensor per rank");
      return result;
    }
    View whole = checked(tensors);
    if (whole.layout)
      throw nb::value_error("a tensor that is cut into equal parts must be contiguous");
    if (whole.count % size) throw nb::value_error("a tensor must have an equal part for each rank");
    size_t part = whole.count / size;
    for (size_t rank = 0; rank < size; ++rank)
      result.push_back({whole.data + rank * part * item_size(dtype), part, nullptr});
    return result;
  }

  static size_t bytes_of(const Call& call) {
    size_t count = 0;
    for (const View& view : call.inputs) count += view.count;
    return count * item_size(call.dtype);
  }

  // A list that its owner may change later, as it is now.
  static nb::object frozen(nb::handle kept) {
    if (!PyList_Check(kept.ptr())) return nb::borrow(kept);
    return nb::steal(PyList_AsTuple(kept.ptr()));
  }

  // A forked child has a copy of its parent's group: no threads, and no say in it.
  void check_own() const {
    if (!origin_.is_here())
      throw Failure(Kind::Backend,
                    "group '" + group_.name() +
                        "' belongs to the process that this one was forked "
                        "from: a child is no rank of it (make the group after the fork, or start "
                        "ranks with spawn)");
  }

  static void set_whole(Call& call) {
    call.detail = mix(call.detail, whole.digest);
    call.whole_number = whole.number;
    whole.what.copy(call.whole, sizeof call.whole - 1);
    whole.site.copy(call.site, sizeof call.site - 1);
  }

  template <class... Kept>
  nb::object issue(Call&& call, double timeout, bool async, Kept... kept) {
    check_own();
    Graveyard::empty();
    if (whole.digest)
      set_whole(call);
    else if (group_.records)
      Sites::find(call.site, call.api, size_t(call.op));
    call.timeout = timeout;
    call.part = batch_part;
    call.parts = batch_parts;
    if (!async) {
      bool done;
      try {
        Unlocked unlock;
        UnderWay call_under_way;
        done = lane_->try_run([&] { group_.run(call); });
      } catch (...) {
        // The others may still use what was lent to them.
        if (call.lent && origin_.is_here())
          board_->park(Graveyard::keep(nb::make_tuple(frozen(kept)...)));
        throw;
      }
      if (done) return nb::none();
    }
    const bool at_once = bytes_of(call) > kShort;
    call.async = async;
    if (trace::Tap::is_open()) {
      call.issued_ns = now_ns();
      call.awaited_ns = std::make_shared<std::atomic<int64_t>>(0);
    }
    auto shared = std::make_shared<Call>(std::move(call));
    // Owned by the job: the caller may be interrupted while it waits.
    auto body = [this, call = shared,
                 alive = Graveyard::keep(nb::make_tuple(frozen(kept)...))](bool on_lane) {
      call->on_lane = on_lane;
      try {
        group_.run(*call);
      } catch (...) {
        if (call->lent && origin_.is_here()) board_->park(alive);
        throw;
      }
    };
    return pending(lane_->submit(std::move(body), at_once), *shared, async);
  }

  // What Python gets for a job in the lane: a way to wait for it, or nothing once it is done.
  nb::object pending(std::shared_ptr<Job> job, const Call& call, bool async) {
    std::shared_ptr<Pending> pending = std::make_shared<PendingJob>(
        nb::find(*this), lane_, std::move(job), board_, group_.rank(), call);
    if (async) return nb::cast(pending);
    {
      Unlocked unlock;
      UnderWay call_under_way;
      pending->wait(-1);
    }
    return nb::none();
  }

  nb::object deliver(Op op, nb::handle tensor, int peer, int tag, double timeout, bool async) {
    check_own();
    Graveyard::empty();
    Look look(tensor);
    auto delivery =
        std::make_shared<Delivery>(op, peer, tag, look.dtype, look.view(), timeout, group_.timeout);
    set_shape(*delivery, look);
    Sites::find(delivery->site, delivery->api, size_t(op));
    if (async) delivery->keep = Graveyard::keep(tensor);
    delivery->async = async;
    {
      Unlocked unlock;
      UnderWay call_under_way;
      mailbox_->start(delivery, async);
      try {
        if (!async) mailbox_->wait(*delivery, delivery->deadline);
      } catch (...) {
        if (origin_.is_here()) mailbox_->cancel(*delivery);
        throw;
      }
    }
    if (!async) return op == Op::Recv ? nb::cast(delivery->source) : nb::none();
    return nb::cast(
        std::shared_ptr<Pending>(std::make_shared<PendingDelivery>(mailbox_, std::move(delivery))));
  }

  const Origin origin_;
  const std::string site_;  // where the group was made
  std::shared_ptr<Board> board_;
  Group group_;
  std::shared_ptr<Mailbox> mailbox_;
  std::shared_ptr<Lane> lane_;  // closed first: its worker uses the others
};

}  // namespace

void bind_engine(nb::module_& m) {
  set_interrupt_check(check_signals);

  m.def(
      "configure",
      [](nb::type_object tensor, nb::object uint8, nb::object int8,
         const std::vector<std::string>& packages) {
        void* table = PyCapsule_GetPointer(
            nb::object(tensor.attr("__dlpack_c_exchange_api__")).ptr(), "dlpack_exchange_api");
        if (!table) throw nb::python_error();
        auto* dlpack = static_cast<const DLPackExchange*>(table);
        if (dlpack->version.major != 1)
          throw Failure(Kind::Backend, "torch speaks DLPack " +
                                           std::to_string(dlpack->version.major) +
                                           ", this version of phalanx knows 1");
        torch().tensor = reinterpret_cast<PyTypeObject*>(tensor.inc_ref().ptr());
        torch().dlpack = dlpack;
        torch().uint8 = uint8.release().ptr();
        torch().int8 = int8.release().ptr();
        Sites::set_packages(packages);
      },
      nb::arg("tensor"), nb::arg("uint8"), nb::arg("int8"), nb::arg("packages"),
      "Tell the core torch's tensor type, its dtypes of a byte, and where no user's code is.");
  m.def(
      "set_debug_level", [](int level) { debug_level = DebugLevel(level); }, nb::arg("level"),
      "Set the debug level of this process.");
  m.def("debug_level", [] { return int(debug_level.load()); }, "Return the debug level set last.");
  m.def(
      "set_shapes_observer",
      [](nb::callable observer) {
        Py_XDECREF(shapes_observer);
        shapes_observer = observer.inc_ref().ptr();
        on_shapes = tell_of_shapes;
      },
      nb::arg("observer"),
      "Set the function that is told, above level OFF, that ranks agree but for their shapes.");
  m.def(
      "batch",
      [](size_t part, size_t parts) {
        batch_part = uint16_t(std::min<size_t>(part, UINT16_MAX));
        batch_parts = uint16_t(std::min<size_t>(parts, UINT16_MAX));
      },
      nb::arg("part"), nb::arg("parts"), "Say which of a batch this thread's next call is.");
  m.def(
      "part_of",
      [](uint64_t digest, std::string what, uint64_t number, std::string site) {
        whole = {digest, number, std::move(what), std::move(site)};
      },
      nb::arg("digest"), nb::arg("what") = "", nb::arg("number") = 0, nb::arg("site") = "",
      "Say what this thread's calls are part of, until told otherwise (0): ranks must agree on "
      "the digest; reports name the rest.");
  m.def(
      "dtype_code",
      [](nb::handle tensor) {
        Look look(tensor);
        return look.fault ? -1 : int(look.dtype);
      },
      nb::arg("tensor").none(),
      "Return the code of a tensor's element type, or -1 if it cannot be exchanged as it is.");
  m.def(
      "common_dtype_code",
      [](nb::list tensors) {
        int common = -1;
        for (nb::handle tensor : tensors) {
          Look look(tensor);
          if (look.fault || (common >= 0 && int(look.dtype) != common)) return -1;
          common = int(look.dtype);
        }
        return common;
      },
      nb::arg("tensors"), "Return the code that all of these tensors have, or -1.");

  m.def(
      "allocate",
      [](size_t bytes) {
        Block* block;
        {
          Unlocked unlock;
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
  nb::class_<Roster>(m, "Roster", "Who is in a world: one record per rank in shared memory.")
      .def_static("create", &Roster::create, nb::arg("size"), nb::arg("threads"),
                  nb::arg("near") = 0)
      .def("place", &Roster::place, nb::arg("rank"), nb::arg("host"), nb::arg("pid"),
           "Say that a rank is on another host; before others open the roster.")
      .def_static("open", &Roster::open, nb::arg("ticket"), nb::call_guard<Unlocked>())
      .def_prop_ro("ticket", &Roster::ticket)
      .def_prop_ro("threads", &Roster::threads)
      .def(
          "join",
          [](Roster& roster, int rank, double timeout, const std::vector<int32_t>& pids) {
            roster.join(rank, Deadline::in(timeout), pids);
          },
          nb::arg("rank"), nb::arg("timeout"), nb::arg("pids") = std::vector<int32_t>{},
          nb::call_guard<Unlocked>())
      .def(
          "count_threads",
          [](const Roster& roster, int rank, int by) {
            roster.change(roster.checked(rank), &Member::threads, by);
          },
          nb::arg("rank"), nb::arg("by"), "One thread more or less acts for a rank.")
      .def("leave", &Roster::leave, nb::arg("rank"))
      .def("fail", &Roster::fail, nb::arg("rank"), nb::arg("why"))
      .def("obituary", &Roster::obituary, nb::arg("rank"), nb::arg("ask_system"),
           nb::call_guard<Unlocked>())
      .def("note", &Roster::note, nb::arg("rank"), nb::arg("text"),
           "Leave a text for all ranks, of which the last 8 KiB are kept.")
      .def(
          "notes",
          [](const Roster& roster) {
            nb::list texts;
            for (const std::string& text : roster.notes())
              texts.append(
                  nb::steal(PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "replace")));
            return texts;
          },
          "Return the notes of all ranks.");

  nb::class_<Pending>(m, "Pending", "An asynchronous operation.")
      .def("done", &Pending::done)
      .def(
          "wait",
          [](Pending& pending, double timeout) {
            {
              Unlocked unlock;
              UnderWay call_under_way;
              pending.wait(timeout);
            }
            Graveyard::empty();
          },
          nb::arg("timeout"))
      .def(
          "check",
          [](Pending& pending) {
            if (auto error = pending.error()) std::rethrow_exception(error);
          },
          "Raise what made it fail, if it has failed.")
      .def("source", &Pending::source);

  nb::class_<Engine>(m, "Group", "One rank's end of a group.")
      .def(nb::new_([](std::shared_ptr<Roster> roster, std::vector<int> members, int rank,
                       const std::string& name, double timeout, const std::string& ticket) {
             return make_here<Engine>(std::move(roster), std::move(members), rank, name, timeout,
                                      ticket);
           }),
           nb::arg("roster"), nb::arg("members"), nb::arg("rank"), nb::arg("name"),
           nb::arg("timeout"), nb::arg("ticket"))
      .def_prop_ro("ticket", &Engine::ticket)
      .def_prop_ro("sequence", &Engine::sequence)
      .def_prop_rw("timeout", &Engine::timeout, &Engine::set_timeout)
      .def("describe", &Engine::describe, nb::arg("rank"),
           "How a rank of the group has ended, or what it does.")
      .def("measure", &Engine::measure, nb::arg("compares"), nb::arg("records"),
           "Do without checks and records, to measure what they cost.")
      .def("history", &Engine::history, "This rank's last operations on the group, oldest first.")
      .def("attend", &Engine::attend, nb::arg("creator"),
           "Say that this rank is there; the creator returns when all are.")
      .def("abort", &Engine::abort, nb::arg("why"), nb::arg("error") = "PeerFailed",
           "Have all who wait, and who come later, raise an error of this class.")
      .def("alarm", &Engine::alarm)
      .def("close", &Engine::close)
      .def("barrier", &Engine::barrier)
      .def("all_reduce", &Engine::all_reduce)
      .def("all_reduce_measured", &Engine::all_reduce_measured)
      .def("reduce", &Engine::reduce)
      .def("broadcast", &Engine::broadcast)
      .def("all_gather", &Engine::all_gather)
      .def("gather", &Engine::gather, nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
      .def("scatter", &Engine::scatter, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
           nb::arg())
      .def("reduce_scatter", &Engine::reduce_scatter)
      .def("all_to_all", &Engine::all_to_all)
      .def("copy_in_turn", &Engine::copy_in_turn)
      .def("send", &Engine::send)
      .def("recv", &Engine::recv);
}
