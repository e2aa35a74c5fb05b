// Naming the line of the user's program that a call comes from.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>

#include "board.hpp"

namespace phalanx {

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

}  // namespace phalanx
