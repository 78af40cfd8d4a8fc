// What the emulated kernels' entry points have in common.
#pragma once

#include <exception>
#include <string>

// The text of the exception that `work` throws, null if it throws none.
template <typename Work>
const char* error_of(Work work) {
    static std::string text;
    try {
        work();
        return nullptr;
    } catch (const std::exception& error) {
        text = error.what();
        return text.c_str();
    }
}

extern "C" {

// `seed` draws the order of the warps from here on.
void set_schedule(unsigned seed) { emulation::state.seed = seed; }
}
