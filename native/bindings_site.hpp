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
      bool inside = self.inside(code);
      PyFrameObject* outer = inside ? PyFrame_GetBack(frame) : nullptr;
      if (!inside || !outer) self.write(site, api, code, frame, called);
      called = code;
      Py_DECREF(code);
      Py_DECREF(frame);
      frame = outer;
    }
  }

 private:
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

  bool inside(PyCodeObject* code) {
    auto known = code_.find(code);
    if (known != code_.end()) return known->second;
    if (code_.size() > 4096) forget();
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    if (!file) PyErr_Clear();
    std::string_view path = file ? file : "";
    bool inside = path.ends_with("/contextlib.py");
    for (auto& package : packages_) inside |= path.starts_with(package);
    Py_INCREF(code);  // so that its address is not given to another
    return code_[code] = inside;
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
      const char* file = PyUnicode_AsUTF8(code->co_filename);
      const char* function = PyUnicode_AsUTF8(code->co_name);
      if (!file || !function) PyErr_Clear();
      std::string_view base = file ? file : "?";
      base = base.substr(base.rfind('/') + 1);
      std::string text = std::string(base) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
      if (function && std::string_view(function) != "<module>")
        text += " in " + std::string(function);
      // Names with a leading underscore are ours to know.
      const char* name = called ? PyUnicode_AsUTF8(called->co_name) : nullptr;
      if (called && !name) PyErr_Clear();
      Text known_text{text.substr(0, sizeof site - 1), name && *name != '_' ? name : ""};
      known_text.api.resize(std::min(known_text.api.size(), sizeof api - 1));
      known = text_.emplace(Place{code, called, at}, std::move(known_text)).first;
    }
    std::memcpy(site, known->second.site.c_str(), known->second.site.size() + 1);
    std::memcpy(api, known->second.api.c_str(), known->second.api.size() + 1);
  }

  void forget() {
    for (auto& [code, inside] : code_) Py_DECREF(code);
    code_.clear();
    text_.clear();
  }

  std::vector<std::string> packages_;
  std::unordered_map<PyCodeObject*, bool> code_;
  std::unordered_map<Place, Text, Hash> text_;
};

}  // namespace phalanx
