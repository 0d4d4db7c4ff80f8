//! What can be tested without a device, and the comparison of the kernels with the host's loops, bit for bit, which
//! skips itself where there is none.

#[cfg(outboard_cuda)]
mod data;
#[cfg(outboard_cuda)]
mod device;
#[cfg(outboard_cuda)]
mod refusals;
#[cfg(outboard_cuda)]
mod single;

use super::*;
use crate::kernel::{GradDType, MomentDType, Noise, WeightKind};

#[test]
fn status_answers_on_any_machine() {
    let status = status();
    assert_eq!(status.compiled.is_some(), cfg!(outboard_cuda));
    assert_eq!(status.devices == 0, status.problem.is_some(), "{status:?}");
    if cfg!(outboard_cuda) {
        assert!(status.runtime_version.is_some(), "{status:?}");
    }
    match (require_device(), status.problem) {
        (Ok(()), None) => {}
        (Err(Error::Cuda(said)), Some(problem)) => assert_eq!(said, problem),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let said = match CudaDevice::new(4096) {
        Err(Error::Cuda(said)) => said,
        other => panic!("{other:?}"),
    };
    match status().problem {
        Some(problem) => assert_eq!(said, problem),
        None => assert!(said.contains("no CUDA device 4096"), "{said}"),
    }
}

/// An update of no elements.
fn nothing(parameter: &str) -> DeviceUpdate<'_> {
    DeviceUpdate {
        parameter,
        weight_kind: WeightKind::F32,
        grad_dtype: GradDType::F32,
        moments: MomentDType::F32,
        weight: 0,
        kept: 0,
        grad: 0,
        exp_avg: 0,
        exp_avg_sq: 0,
        max_exp_avg_sq: 0,
        len: 0,
        first: 0,
        constants: crate::AdamWConfig::default().constants(1.0, 1.0),
        noise: Noise::default(),
        grad_scale: None,
    }
}

#[cfg(not(outboard_cuda))]
#[test]
fn without_the_library_the_error_names_the_parameter_and_the_cure() {
    // SAFETY: the stand-in does not use the pointers.
    let Err(Error::Cuda(said)) = (unsafe { adamw(&nothing("head.weight"), 0) }) else { panic!("no error") };
    assert!(said.contains("head.weight") && said.contains("OUTBOARD_CUDA=require"), "{said}");
}
