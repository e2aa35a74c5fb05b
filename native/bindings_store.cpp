// Stores for Python. Every call that can wait releases the GIL, and in the main thread looks for
// Ctrl-C.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <memory>
#include <string_view>

#include "bindings_unlocked.hpp"
#include "store/client.hpp"
#include "store/file.hpp"
#include "store/heart.hpp"
#include "store/server.hpp"
#include "store/table.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace phalanx::store;

namespace {

void check_signals() {
  const phalanx::Origin origin;
  nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals()) throw nb::python_error();
  if (!origin.is_here())
    throw phalanx::Failure(phalanx::Kind::Store,
                           "this process was forked in the middle of a request of its parent (by a "
                           "signal handler), which gets the answer; let a child that a handler "
                           "forks end there");
}

// Python runs signal handlers in the main thread only, so others have nothing to look for.
Patience patience(double seconds) {
  return Patience(seconds, gettid() == getpid() ? check_signals : nullptr);
}

[[noreturn]] void wrong_type(const char* what, nb::handle got, const char* rule) {
  std::string message =
      std::string("store: ") + what + " must be " + rule + ", not " + Py_TYPE(got.ptr())->tp_name;
  throw nb::type_error(message.c_str());
}

std::string text(nb::handle object) {
  Py_ssize_t size;
  const char* data = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (!data) throw nb::python_error();
  return {data, static_cast<size_t>(size)};
}

std::string key(nb::handle object) {
  if (!PyUnicode_Check(object.ptr())) wrong_type("a key", object, "str");
  return text(object);
}

std::string value(nb::handle object) {
  if (PyUnicode_Check(object.ptr())) return text(object);
  if (PyBytes_Check(object.ptr())) {
    return {PyBytes_AS_STRING(object.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(object.ptr()))};
  }
  wrong_type("a value", object, "str or bytes");
}

template <class Convert>
std::vector<std::string> several(nb::handle sequence, const char* what, Convert convert) {
  // A string is a sequence of strings too, and never what was meant.
  if (PyUnicode_Check(sequence.ptr()) || !PySequence_Check(sequence.ptr()))
    wrong_type(what, sequence, "a list");
  std::vector<std::string> list;
  for (nb::handle item : sequence) list.push_back(convert(item));
  return list;
}

// A list in braces would be copied.
template <class... Texts>
std::vector<std::string> list(Texts... texts) {
  std::vector<std::string> result;
  result.reserve(sizeof...(texts));
  (result.push_back(std::move(texts)), ...);
  return result;
}

nb::bytes bytes(std::string_view text) { return nb::bytes(text.data(), text.size()); }

std::string_view view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

Reply run(Store& store, Request request, double timeout) {
  Unlocked release;
  return store.run(std::move(request), patience(timeout));
}

}  // namespace

void bind_stores(nb::module_& m) {
  nb::class_<Store>(m, "Store")
      .def("set",
           [](Store& store, nb::handle k, nb::handle v, double timeout) {
             run(store, {Op::Set, 0, list(key(k)), list(value(v))}, timeout);
           })
      .def("multi_set",
           [](Store& store, nb::handle keys, nb::handle values, double timeout) {
             run(store, {Op::Set, 0, several(keys, "keys", key), several(values, "values", value)},
                 timeout);
           })
      .def("get",
           [](Store& store, nb::handle k, double timeout) {
             return bytes(run(store, {Op::Get, 0, list(key(k))}, timeout).values.at(0));
           })
      .def("multi_get",
           [](Store& store, nb::handle keys, double timeout) {
             nb::list found;
             for (auto& text : run(store, {Op::Get, 0, several(keys, "keys", key)}, timeout).values)
               found.append(bytes(text));
             return found;
           })
      .def("add",
           [](Store& store, nb::handle k, int64_t amount, double timeout) {
             return run(store, {Op::Add, amount, list(key(k))}, timeout).number;
           })
      .def("append",
           [](Store& store, nb::handle k, nb::handle v, double timeout) {
             run(store, {Op::Append, 0, list(key(k)), list(value(v))}, timeout);
           })
      .def("check",
           [](Store& store, nb::handle keys, double timeout) {
             return run(store, {Op::Check, 0, several(keys, "keys", key)}, timeout).number != 0;
           })
      .def("wait",
           [](Store& store, nb::handle keys, double timeout) {
             run(store, {Op::Wait, 0, several(keys, "keys", key)}, timeout);
           })
      .def("compare_set",
           [](Store& store, nb::handle k, nb::handle expected, nb::handle desired, double timeout) {
             Request request{Op::CompareSet, 0, list(key(k)),
                             list(value(expected), value(desired))};
             return bytes(run(store, std::move(request), timeout).values.at(0));
           })
      .def("delete_key",
           [](Store& store, nb::handle k, double timeout) {
             return run(store, {Op::Delete, 0, list(key(k))}, timeout).number != 0;
           })
      .def("num_keys",
           [](Store& store, double timeout) { return run(store, {Op::NumKeys}, timeout).number; })
      .def("list_keys",
           [](Store& store, double timeout) { return run(store, {Op::ListKeys}, timeout).values; })
      .def("queue_push",
           [](Store& store, nb::handle k, nb::handle v, double timeout) {
             run(store, {Op::Push, 0, list(key(k)), list(value(v))}, timeout);
           })
      .def("queue_pop",
           [](Store& store, nb::handle k, bool block, double timeout) {
             return bytes(run(store, {Op::Pop, block, list(key(k))}, timeout).values.at(0));
           })
      .def("barrier",
           [](Store& store, nb::handle k, int64_t world_size, double timeout) {
             run(store, {Op::Barrier, world_size, list(key(k))}, timeout);
           })
      .def("queue_len", [](Store& store, nb::handle k, double timeout) {
        return run(store, {Op::Length, 0, list(key(k))}, timeout).number;
      });

  // All are made by make_here: a forked child leaves its copies alone.
  nb::class_<Table, Store>(m, "Table").def(nb::new_([] { return phalanx::make_here<Table>(); }));

  nb::class_<File, Store>(m, "FileLog")
      .def(nb::new_([](std::string path, int64_t users) {
        Unlocked release;
        return phalanx::make_here<File>(std::move(path), users);
      }))
      .def("close", &File::close, nb::call_guard<Unlocked>());

  nb::class_<Client, Store>(m, "StoreClient")
      .def(nb::new_([](std::string host, int port, std::string secret, double timeout) {
        Unlocked release;
        return phalanx::make_here<Client>(std::move(host), port, std::move(secret),
                                          patience(timeout));
      }));

  nb::class_<Heart>(m, "Heart", "Raises a count in a store from time to time.")
      .def(nb::new_([](Store& store, std::string key, double interval) {
             return phalanx::make_here<Heart>(store, std::move(key), interval);
           }),
           nb::arg("store"), nb::arg("key"), nb::arg("interval"), nb::keep_alive<0, 2>())
      .def("stop", &Heart::stop, nb::call_guard<Unlocked>())
      .def("silence", &Heart::silence, "Return the seconds since the store last answered.")
      .def("refused", &Heart::refused, "Say whether the store could not be reached at all.");

  nb::class_<Server>(m, "StoreServer", nb::is_weak_referenceable())
      .def(nb::new_([](std::string host, int port, std::string secret, int listen_fd,
                       double handshake, double frame, size_t connections, size_t strangers,
                       double courtesy) {
             Unlocked release;
             Descriptor listener =
                 listen_fd >= 0 ? adopt_listener(listen_fd) : listen_on(host, port);
             return phalanx::make_here<Server>(
                 std::move(listener), std::move(secret),
                 Server::Limits{handshake, frame, connections, strangers, courtesy});
           }),
           "host"_a, "port"_a, "secret"_a, "listen_fd"_a = -1,
           "handshake"_a = Server::Limits().handshake, "frame"_a = Server::Limits().frame,
           "connections"_a = Server::Limits().connections,
           "strangers"_a = Server::Limits().strangers, "courtesy"_a = Server::Limits().courtesy)
      .def_prop_ro("port", &Server::port);

  // For the tests, which hold them against hashlib.
  m.def("sha256",
        [](nb::bytes message) { return bytes(phalanx::view(phalanx::sha256(view(message)))); });
  m.def("hmac_sha256", [](nb::bytes key, nb::bytes message) {
    return bytes(phalanx::view(phalanx::hmac_sha256(view(key), view(message))));
  });
}
