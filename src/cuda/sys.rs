//! The C interface of `cuda/outboard_cuda.h`, which says what each function does and where each pointer lives.

use crate::kernel::Constants;
use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

/// In place of a device's ordinal.
pub(super) const CURRENT_DEVICE: c_int = -1;
pub(super) const TO_DEVICE: c_int = 0;
pub(super) const TO_HOST: c_int = 1;

/// `outboard_cuda_update`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Update {
    pub(super) constants: Constants,
    pub(super) weight: *mut c_void,
    pub(super) kept: *mut c_void,
    pub(super) grad: *const c_void,
    pub(super) exp_avg: *mut c_void,
    pub(super) exp_avg_sq: *mut c_void,
    pub(super) max_exp_avg_sq: *mut c_void,
    pub(super) n: u64,
    pub(super) first: u64,
    pub(super) noise_key: u64,
    pub(super) grad_scale: f32,
}

/// `outboard_cuda_copy`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Copy {
    pub(super) to: *mut c_void,
    pub(super) from: *const c_void,
    pub(super) bytes: u64,
}

/// `outboard_cuda_grad`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Grad {
    pub(super) address: *mut c_void,
    pub(super) n: u64,
    pub(super) kind: i32,
}

// The layouts that static_asserts in cuda/ state for the other side.
const _: () = {
    assert!(size_of::<Update>() == 120);
    assert!(offset_of!(Update, weight) == 40);
    assert!(offset_of!(Update, kept) == 48);
    assert!(offset_of!(Update, grad) == 56);
    assert!(offset_of!(Update, exp_avg) == 64);
    assert!(offset_of!(Update, exp_avg_sq) == 72);
    assert!(offset_of!(Update, max_exp_avg_sq) == 80);
    assert!(offset_of!(Update, n) == 88);
    assert!(offset_of!(Update, first) == 96);
    assert!(offset_of!(Update, noise_key) == 104);
    assert!(offset_of!(Update, grad_scale) == 112);
    assert!(size_of::<Copy>() == 24);
    assert!(offset_of!(Copy, to) == 0 && offset_of!(Copy, from) == 8 && offset_of!(Copy, bytes) == 16);
    assert!(size_of::<Grad>() == 24);
    assert!(offset_of!(Grad, address) == 0 && offset_of!(Grad, n) == 8 && offset_of!(Grad, kind) == 16);
};

unsafe extern "C" {
    pub(super) fn outboard_cuda_adamw(
        device: c_int,
        weight_kind: c_int,
        grad_kind: c_int,
        moment_kind: c_int,
        update: *const Update,
        per_processor: u32,
        stream: *mut c_void,
    ) -> c_int;

    pub(super) fn outboard_cuda_adamw_many(
        device: c_int,
        weight_kind: c_int,
        grad_kind: c_int,
        moment_kind: c_int,
        table: *mut c_void,
        table_bytes: u64,
        updates: *const Update,
        count: u64,
        refused: *mut u64,
        stream: *mut c_void,
    ) -> c_int;

    pub(super) fn outboard_cuda_copy_many(
        device: c_int,
        table: *mut c_void,
        table_bytes: u64,
        copies: *const Copy,
        count: u64,
        stream: *mut c_void,
    ) -> c_int;

    pub(super) fn outboard_cuda_squares(
        device: c_int,
        table: *mut c_void,
        table_bytes: u64,
        partials: *mut f64,
        partial_count: u64,
        grads: *const Grad,
        count: u64,
        scale: f32,
        stream: *mut c_void,
    ) -> c_int;

    pub(super) fn outboard_cuda_unscale(device: c_int, grad: *const Grad, scale: f32, stream: *mut c_void) -> c_int;

    pub(super) fn outboard_cuda_enter_thread(device: c_int) -> c_int;

    #[cfg(test)]
    pub(super) fn outboard_cuda_current_device(device: *mut c_int) -> c_int;

    pub(super) fn outboard_cuda_stream_create(device: c_int, high_priority: c_int, stream: *mut *mut c_void) -> c_int;

    pub(super) fn outboard_cuda_stream_destroy(device: c_int, stream: *mut c_void) -> c_int;

    pub(super) fn outboard_cuda_event_create(device: c_int, event: *mut *mut c_void) -> c_int;

    pub(super) fn outboard_cuda_event_destroy(device: c_int, event: *mut c_void) -> c_int;

    pub(super) fn outboard_cuda_event_record(device: c_int, event: *mut c_void, stream: *mut c_void) -> c_int;

    pub(super) fn outboard_cuda_event_query(device: c_int, event: *mut c_void, done: *mut c_int) -> c_int;

    pub(super) fn outboard_cuda_stream_wait_event(device: c_int, stream: *mut c_void, event: *mut c_void) -> c_int;

    pub(super) fn outboard_cuda_copy_async(
        device: c_int,
        direction: c_int,
        to: *mut c_void,
        from: *const c_void,
        bytes: u64,
        stream: *mut c_void,
    ) -> c_int;

    pub(super) fn outboard_cuda_host_register(device: c_int, start: *mut c_void, bytes: u64) -> c_int;

    pub(super) fn outboard_cuda_host_unregister(device: c_int, start: *mut c_void) -> c_int;

    pub(super) fn outboard_cuda_malloc(device: c_int, bytes: u64, memory: *mut *mut c_void) -> c_int;

    pub(super) fn outboard_cuda_free(device: c_int, memory: *mut c_void) -> c_int;

    pub(super) fn outboard_cuda_can_address_host(device: c_int, answer: *mut c_int) -> c_int;

    pub(super) fn outboard_cuda_has_ranges() -> c_int;

    pub(super) fn outboard_cuda_range_domain(name: *const c_char) -> *mut c_void;

    pub(super) fn outboard_cuda_range_begin(domain: *mut c_void, message: *const c_char) -> u64;

    pub(super) fn outboard_cuda_range_end(domain: *mut c_void, range: u64);

    pub(super) fn outboard_cuda_probe(
        devices: *mut c_int,
        driver_version: *mut c_int,
        runtime_version: *mut c_int,
    ) -> c_int;

    pub(super) fn outboard_cuda_error_name(error: c_int) -> *const c_char;

    pub(super) fn outboard_cuda_error_string(error: c_int) -> *const c_char;
}
