//! What can go wrong, as one enum. Every message says what was wanted and what was found, and names the parameter where
//! there is one; the Python bindings map each variant to one exception class.

use std::fmt;

/// A chunk of one parameter that could not be updated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The parameter's name as it was registered.
    pub parameter: String,
    /// Index of the first element of the chunk, in the order of the state's memory.
    pub first: usize,
    /// Number of elements in the chunk.
    pub len: usize,
    /// What the worker said.
    pub cause: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { parameter, first, len, cause } = self;
        write!(f, "{parameter}, elements {first}..{}: {cause}", first + len)
    }
}

/// The one error type of the crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value outside what is allowed: a hyperparameter, a length, a layout.
    #[error("{0}")]
    InvalidValue(String),

    /// A dtype, device or kind of tensor that is not supported.
    #[error("{0}")]
    UnsupportedType(String),

    /// Host memory could not be mapped.
    #[error("cannot map {bytes} bytes of host memory: {cause}")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        cause: std::io::Error,
    },

    /// The worker threads could not be started.
    #[error("cannot start {threads} worker threads: {cause}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        cause: String,
    },

    /// Workers failed in the middle of a step. All failures of the step are kept; the parameters they name are poisoned
    /// until their state is loaded or reset, all others have been updated.
    #[error("{} of this step's chunks failed: {}", .0.len(), join(.0))]
    Worker(Vec<Failure>),

    /// A step was asked for while a parameter's state is half updated by an earlier failure.
    #[error(
        "{parameter} is half updated since an earlier step failed ({cause}); load its weight and state, or reset its state, \
         before the next step"
    )]
    Poisoned {
        /// The parameter's name.
        parameter: String,
        /// The failure that poisoned it.
        cause: String,
    },

    /// A gradient is infinite or NaN and the policy is to raise. Nothing was changed.
    #[error("the gradients' norm is {norm}: non-finite gradients in {}", list(.parameters))]
    NonFinite {
        /// The total norm, infinite or NaN.
        norm: f64,
        /// The parameters whose gradients are not finite.
        parameters: Vec<String>,
    },

    /// The optimizer was made in another process; worker threads and state do not survive a fork.
    #[error(
        "this optimizer belongs to process {made_in} and was used in its fork {used_in}: worker threads and state do not \
         survive a fork; build the optimizer in the process that steps it"
    )]
    Forked {
        /// Process that made it.
        made_in: u32,
        /// Process that used it.
        used_in: u32,
    },

    /// State was asked for what it cannot do where it is. Nothing was changed.
    #[error("{asked}: {name} is {place}, and must be {wanted}")]
    Transition {
        /// The state's name.
        name: String,
        /// Where it is.
        place: String,
        /// What was asked.
        asked: &'static str,
        /// From where that is possible.
        wanted: &'static str,
    },

    /// A pool of host memory has no buffer left, and may map no more.
    #[error(
        "cannot lend {asked} bytes of host memory ({rounded} as rounded): the pool holds {held} of {allowed} bytes allowed, \
         {live} of them lent; release buffers, or raise max_bytes"
    )]
    PoolLimit {
        /// Bytes asked for.
        asked: usize,
        /// Bytes of the buffer that it takes.
        rounded: usize,
        /// Bytes mapped.
        held: usize,
        /// Bytes of buffers that are lent.
        live: usize,
        /// Bytes that may be mapped.
        allowed: usize,
    },

    /// CUDA is not there, or a call to it failed.
    #[error("{0}")]
    Cuda(String),
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

fn join(failures: &[Failure]) -> String {
    failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn list(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let shown = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN { format!("{shown} and {} more", names.len() - SHOWN) } else { shown }
}
