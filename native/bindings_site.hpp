// Naming the line of the user's program that a call comes from.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "board.hpp"
#include "group.hpp"

namespace phalanx {

// Where in the user's code a call was made: the innermost frame outside of this package, of torch,
// of context managers and of the decorator of what is deprecated. And which of our functions it
// called there.
class Sites {
 public:
  static void set_packages(std::vector<std::string> directories) {
    instance().packages_ = std::move(directories);
  }

  static std::string find() {
    char site[80] = {}, api[24] = {};
    instance().walk(site, api);
    return site;
  }
  static void find(char (&site)[80], char (&api)[24]) { instance().walk(site, api); }
  // `kind` is any number of the caller's, small and the same for calls that come the same way.
  static void find(char (&site)[80], char (&api)[24], size_t kind) {
    Sites& self = instance();
    if (self.recall(site, api, kind)) return;
    Seen seen = self.walk(site, api);
    if (kind >= std::size(self.depths_)) return;
    self.depths_[kind] = seen.depth;
    self.seen_[{seen.place.code, seen.place.at, kind}] = seen;
  }

 private:
  enum class Side { Out, In, Nameless };  // Nameless: a decorator's, which calls what was meant
  struct Place {
    PyCodeObject* code;
    PyCodeObject* called;
    int at;
    bool operator==(const Place&) const = default;
  };
  struct Hash {
    size_t operator()(const Place& place) const {
      return mix(mix(uint64_t(place.at), reinterpret_cast<uint64_t>(place.code)),
                 reinterpret_cast<uint64_t>(place.called));
    }
  };
  struct Text {
    std::string site, api;
    void copy(char (&to_site)[80], char (&to_api)[24]) const {
      std::memcpy(to_site, site.c_str(), site.size() + 1);
      std::memcpy(to_api, api.c_str(), api.size() + 1);
    }
  };
  // Where a walk has ended, how many frames up.
  struct Seen {
    Place place;
    int depth;
    const Text* text;
  };
  struct Key {
    PyCodeObject* code;
    int at;
    size_t kind;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return mix(uint64_t(key.at) << 8 | key.kind, reinterpret_cast<uint64_t>(key.code));
    }
  };
  static Sites& instance() {
    static auto& instance = *new Sites;
    return instance;
  }

  // Most calls come again from where they came before. Walking makes an object of every frame on
  // the way; asking for the frame as far up as last time makes one. It is the right one if a walk
  // from the same instruction has ended there, at the same distance.
  bool recall(char (&site)[80], char (&api)[24], size_t kind) {
    static PyObject* const get_frame = PySys_GetObject("_getframe");
    if (kind >= std::size(depths_) || depths_[kind] == 0 || !get_frame) return false;
    PyObject* depth = PyLong_FromLong(depths_[kind]);
    auto* frame =
        reinterpret_cast<PyFrameObject*>(PyObject_Vectorcall(get_frame, &depth, 1, nullptr));
    Py_DECREF(depth);
    if (!frame) {
      PyErr_Clear();  // there are fewer
      return false;
    }
    PyCodeObject* code = PyFrame_GetCode(frame);
    auto known = seen_.find({code, position(frame), kind});
    Py_DECREF(code);
    Py_DECREF(frame);
    if (known == seen_.end() || known->second.depth != depths_[kind]) return false;
    known->second.text->copy(site, api);
    return true;
  }

  Seen walk(char (&site)[80], char (&api)[24]) {
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    PyCodeObject* called = nullptr;  // alive: the cache of known code keeps it
    Seen seen{};
    for (int depth = 0; frame; ++depth) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      Side side = this->side(code);
      PyFrameObject* outer = side != Side::Out ? PyFrame_GetBack(frame) : nullptr;
      if (!outer) seen = {{code, called, position(frame)}, depth, &text_of(code, frame, called)};
      if (side == Side::In) called = code;
      Py_DECREF(code);
      Py_DECREF(frame);
      frame = outer;
    }
    if (seen.text) seen.text->copy(site, api);
    return seen;
  }

  static int position(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
    return PyFrame_GetLasti(frame);
#else
    return PyFrame_GetLineNumber(frame);
#endif
  }

  Side side(PyCodeObject* code) {
    auto known = code_.find(code);
    if (known != code_.end()) return known->second;
    if (code_.size() > 4096) forget();
    std::string_view path = text(code->co_filename);
    bool inside = path.ends_with("/contextlib.py") || path.ends_with("/typing_extensions.py");
    for (auto& package : packages_) inside |= path.starts_with(package);
    Py_INCREF(code);  // so that its address is not given to another
    return code_[code] = !inside                            ? Side::Out
                         : text(code->co_name) == "wrapper" ? Side::Nameless
                                                            : Side::In;
  }

  static std::string_view text(PyObject* string) {
    const char* found = PyUnicode_AsUTF8(string);
    if (!found) PyErr_Clear();
    return found ? found : "";
  }

  const Text& text_of(PyCodeObject* code, PyFrameObject* frame, PyCodeObject* called) {
    const Place place{code, called, position(frame)};
    auto known = text_.find(place);
    if (known == text_.end()) {
      std::string_view file = text(code->co_filename), function = text(code->co_name);
      std::string where(file.substr(file.rfind('/') + 1));
      where += ":" + std::to_string(PyFrame_GetLineNumber(frame));
      if (!function.empty() && function != "<module>") where += " in " + std::string(function);
      std::string_view name = called ? text(called->co_name) : "";
      if (name.starts_with('_')) name = "";  // ours to know
      Text found{where.substr(0, sizeof(Call::site) - 1),
                 std::string(name.substr(0, sizeof(Call::api) - 1))};
      known = text_.emplace(place, std::move(found)).first;
    }
    return known->second;
  }

  void forget() {
    for (auto& [code, side] : code_) Py_DECREF(code);
    code_.clear();
    text_.clear();
    seen_.clear();
  }

  std::vector<std::string> packages_;
  std::unordered_map<PyCodeObject*, Side> code_;
  std::unordered_map<Place, Text, Hash> text_;
  std::unordered_map<Key, Seen, KeyHash> seen_;
  int depths_[32] = {};  // of the last call, by kind
};

}  // namespace phalanx
