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

// The device from here on. Shared memory in bytes: the most a block may have, all of a multiprocessor, and what a launch may
// use without asking. `seed` draws the order of the warps.
void set_device(int capability, int shared_per_block, int shared_per_processor, int shared_unasked, unsigned seed) {
    auto& device = emulation::state;
    device.capability = capability;
    device.shared_per_block = shared_per_block;
    device.shared_per_processor = shared_per_processor;
    device.shared_unasked = shared_unasked;
    device.seed = seed;
    device.shared_asked_for.clear();
}

// Shared memory that a block uses besides what a launch asks for; blocks and bytes of the cluster that ran last.
int reserved_bytes() { return emulation::RESERVED; }
int variable_bytes() { return emulation::VARIABLES; }
int last_cluster() { return emulation::state.blocks.size(); }
size_t last_shared_bytes() { return emulation::state.blocks[0].dynamic.size() - emulation::GUARD; }
}
