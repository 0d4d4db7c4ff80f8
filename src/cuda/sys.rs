//! The C interface of `cuda/outboard_cuda.h`, which says what each function does and where each pointer lives.

use crate::kernel::Constants;
use std::ffi::{c_char, c_int, c_void};

unsafe extern "C" {
    pub(super) fn outboard_cuda_adamw(
        weight_kind: c_int,
        grad_kind: c_int,
        moment_kind: c_int,
        weight: *mut c_void,
        kept: *mut c_void,
        grad: *const c_void,
        exp_avg: *mut c_void,
        exp_avg_sq: *mut c_void,
        max_exp_avg_sq: *mut c_void,
        n: i64,
        first: u64,
        constants: *const Constants,
        noise_key: u64,
        grad_scale: f32,
        stream: *mut c_void,
    ) -> c_int;

    pub(super) fn outboard_cuda_probe(
        devices: *mut c_int,
        driver_version: *mut c_int,
        runtime_version: *mut c_int,
    ) -> c_int;

    pub(super) fn outboard_cuda_error_name(error: c_int) -> *const c_char;

    pub(super) fn outboard_cuda_error_string(error: c_int) -> *const c_char;
}
