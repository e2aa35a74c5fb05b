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

namespace phalanx {

// Where in the user's code a call was made: the innermost frame outside of this package, of torch
// and of context managers. And which of our functions it called there.
class Sites {
 public:
  static void set_packages(std::vector<std::string> directories) {
    instance().packages_ = std::move(directories);
  }

  static std::string find() {
    char site[80] = {}, api[24] = {};
    find(site, api);
    return site;
  }
  static void find(char (&site)[80], char (&api)[24]) {
    Sites& self = instance();
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    PyCodeObject* called = nullptr;  // alive: the cache of known code keeps it
    while (frame) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      Side side = self.side(code);
      PyFrameObject* outer = side != Side::Out ? PyFrame_GetBack(frame) : nullptr;
      if (!outer) self.write(site, api, code, frame, called);
      if (side == Side::In) called = code;
      Py_DECREF(code);
      Py_DECREF(frame);
      frame = outer;
    }
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
  };
  static Sites& instance() {
    static auto& instance = *new Sites;
    return instance;
  }

  Side side(PyCodeObject* code) {
    auto known = code_.find(code);
    if (known != code_.end()) return known->second;
    if (code_.size() > 4096) forget();
    std::string_view path = text(code->co_filename);
    bool inside = path.ends_with("/contextlib.py");
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

  void write(char (&site)[80], char (&api)[24], PyCodeObject* code, PyFrameObject* frame,
             PyCodeObject* called) {
#if PY_VERSION_HEX >= 0x030B0000
    int at = PyFrame_GetLasti(frame);
#else
    int at = PyFrame_GetLineNumber(frame);
#endif
    auto known = text_.find({code, called, at});
    if (known == text_.end()) {
      std::string_view file = text(code->co_filename), function = text(code->co_name);
      std::string where(file.substr(file.rfind('/') + 1));
      where += ":" + std::to_string(PyFrame_GetLineNumber(frame));
      if (!function.empty() && function != "<module>") where += " in " + std::string(function);
      std::string_view name = called ? text(called->co_name) : "";
      if (name.starts_with('_')) name = "";  // ours to know
      Text known_text{where.substr(0, sizeof site - 1), std::string(name)};
      known_text.api.resize(std::min(known_text.api.size(), sizeof api - 1));
      known = text_.emplace(Place{code, called, at}, std::move(known_text)).first;
    }
    std::memcpy(site, known->second.site.c_str(), known->second.site.size() + 1);
    std::memcpy(api, known->second.api.c_str(), known->second.api.size() + 1);
  }

  void forget() {
    for (auto& [code, side] : code_) Py_DECREF(code);
    code_.clear();
    text_.clear();
  }

  std::vector<std::string> packages_;
  std::unordered_map<PyCodeObject*, Side> code_;
  std::unordered_map<Place, Text, Hash> text_;
};

}  // namespace phalanx
