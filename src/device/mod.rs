//! A device as the engine sees it: streams on which work happens in order, events between them, copies to and from host
//! memory, and the kernels. [`crate::cuda::CudaDevice`] is a GPU; [`simulated::SimulatedDevice`] is host memory with
//! threads for streams, whose order of completion a test controls. This layer knows memory and the recipe's constants;
//! it knows neither parameters nor queues.

pub mod simulated;

use crate::error::Result;
use crate::kernel::{Constants, GradDType, MomentDType, Noise, WeightKind};
use crate::memory::{DeviceSpan, HostSpan};
use std::any::Any;
use std::fmt::Debug;

/// The streams of one device. Work on one happens in the order in which it was given; between streams, events order it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// State to the device, for the GPU lane.
    StateIn,
    /// Updates on the device.
    Update,
    /// State from the device.
    StateOut,
    /// Gradients and weights from the device, for the CPU lane.
    Down,
    /// Weights to the device.
    Up,
    /// A stream of the caller's, by its handle (`cudaStream_t`; 0 is the default stream).
    Foreign(usize),
}

/// One run of one parameter to update on the device. Addresses are the device's, of contiguous elements that do not
/// overlap and are aligned to their own size: its own memory, or host memory pinned and mapped.
#[derive(Clone, Copy, Debug)]
pub struct DeviceUpdate<'a> {
    /// The parameter's name, for error messages.
    pub parameter: &'a str,
    /// The dtype of `weight`, and what `kept` holds.
    pub weight_kind: WeightKind,
    /// The dtype of `grad`.
    pub grad_dtype: GradDType,
    /// The dtype of the moments.
    pub moments: MomentDType,
    /// The live weights, read and written.
    pub weight: usize,
    /// The residuals or masters, read and written; 0 for [`WeightKind::F32`].
    pub kept: usize,
    /// The gradients, read.
    pub grad: usize,
    /// The first moments, read and written.
    pub exp_avg: usize,
    /// The second moments, read and written.
    pub exp_avg_sq: usize,
    /// The second moments' maxima, read and written; 0 without amsgrad.
    pub max_exp_avg_sq: usize,
    /// Number of elements in each plane. With 0 the addresses are not looked at.
    pub len: usize,
    /// The parameter's index of element 0.
    pub first: u64,
    /// The group's constants at this step.
    pub constants: Constants,
    /// The random bits of bf16 moments.
    pub noise: Noise,
    /// Gradients are divided by it first; they are not written back.
    pub grad_scale: Option<f32>,
}

/// A run of bytes to copy within what the device can address. Both addresses are aligned to 2 bytes at least.
#[derive(Clone, Copy, Debug)]
pub struct DeviceCopy {
    /// Where to.
    pub to: usize,
    /// Where from.
    pub from: usize,
    /// How many bytes.
    pub bytes: usize,
}

/// A contiguous gradient whose squares are to be added up, in logical order.
#[derive(Clone, Copy, Debug)]
pub struct DeviceGrad {
    /// Its address on the device.
    pub address: usize,
    /// Number of elements.
    pub len: usize,
    /// Its dtype.
    pub dtype: GradDType,
}

/// Bytes of a table entry for one update, at most; what [`Device::update_many`] needs of its table per update, and
/// [`Device::copy_many`] and [`Device::squares`] per item.
pub const TABLE_ENTRY_BYTES: usize = 192;

/// A device. Failures are [`crate::Error::Cuda`], with CUDA's name of the error and, in an update, the parameter's.
///
/// Methods give work to a stream and return, unless they say that they wait. Memory named in that work must stay as the
/// spans' contracts say until the stream has done it: whoever gives the work keeps the spans until an event says so.
pub trait Device: Debug + Send + Sync + 'static {
    /// A mark on a stream. Dropping one that is not done is fine.
    type Event: Debug + Send + Sync + 'static;

    /// Prepares the calling thread to work with this device: to be called once on each thread that the engine owns.
    /// Other threads need not; methods leave their current device as it was.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    fn enter_thread(&self) -> Result<()>;

    /// An event to record; before that, what it says is of no meaning.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    fn event(&self) -> Result<Self::Event>;

    /// Marks what has been given to `stream` so far. Recording again moves the mark.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`]; also if the stream is being captured into a CUDA graph.
    fn record(&self, event: &Self::Event, stream: Stream) -> Result<()>;

    /// Lets what is given to `stream` from now on begin only after the event's mark, as it now is.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    fn order(&self, stream: Stream, after: &Self::Event) -> Result<()>;

    /// Whether everything before the mark is done. Does not wait.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`]: the device has failed, and everything after will, too.
    fn is_done(&self, event: &Self::Event) -> Result<bool>;

    /// Waits until everything before the mark is done.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    fn wait(&self, event: &Self::Event) -> Result<()>;

    /// Copies host memory to the device; as long as `from`.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    fn copy_in(&self, to: &DeviceSpan, from: &HostSpan, stream: Stream) -> Result<()>;

    /// Copies the device's memory to the host; as long as `to`.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    fn copy_out(&self, to: &HostSpan, from: &DeviceSpan, stream: Stream) -> Result<()>;

    /// Updates one run.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`] with the parameter's name. Nothing has been started then.
    fn update(&self, update: &DeviceUpdate<'_>, stream: Stream) -> Result<()>;

    /// Updates many runs of the same dtypes with one launch. `table` is pinned host memory of at least
    /// [`TABLE_ENTRY_BYTES`] per update, aligned to 16 bytes, written now and in use until the work is done.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`]. Nothing has been started then.
    fn update_many(&self, table: &mut HostSpan, updates: &[DeviceUpdate<'_>], stream: Stream) -> Result<()>;

    /// Does many copies with one launch. `table` as for [`Self::update_many`].
    ///
    /// # Errors
    /// [`crate::Error::Cuda`]. Nothing has been started then.
    fn copy_many(&self, table: &mut HostSpan, copies: &[DeviceCopy], stream: Stream) -> Result<()>;

    /// Adds up the squares of blocks of [`crate::kernel::NORM_BLOCK`] elements of each gradient, divided by `scale` first
    /// (1 leaves them), in the order of `kernel::norm`: an f64 for each block, gradients one after the other, written to
    /// `partials`, which is pinned and aligned to 8 bytes. `table` as for [`Self::update_many`].
    ///
    /// # Errors
    /// [`crate::Error::Cuda`]. Nothing has been started then.
    fn squares(
        &self,
        table: &mut HostSpan,
        partials: &HostSpan,
        grads: &[DeviceGrad],
        scale: f32,
        stream: Stream,
    ) -> Result<()>;

    /// Divides a gradient by `scale` in place, in fp32, rounded once to its dtype.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    fn unscale(&self, grad: &DeviceGrad, scale: f32, stream: Stream) -> Result<()>;

    /// Memory on the device, and what frees it when it is dropped (which may wait for the device).
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    fn allocate(&self, bytes: usize) -> Result<(DeviceSpan, Box<dyn Any + Send + Sync>)>;

    /// Pins a run of host memory, on page borders, so that this and every other device can copy to and from it by itself
    /// and address it as the host does. What is returned ends that when it is dropped.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    fn pin(&self, start: usize, bytes: usize) -> Result<Box<dyn Any + Send + Sync>>;

    /// Waits until all is done that has been given to these streams.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`]: nobody can say when that is.
    fn drain(&self, streams: &[Stream]) -> Result<()> {
        let event = self.event()?;
        streams.iter().try_for_each(|&stream| {
            self.record(&event, stream)?;
            self.wait(&event)
        })
    }

    /// Whether kernels can address pinned host memory, at the host's own addresses.
    fn can_address_host(&self) -> bool;

    /// Begins a range in what profilers show of this process (NVTX, domain `outboard`). It ends when what is returned is
    /// dropped, on any thread; ranges may overlap. Nothing of it reaches the device.
    fn begin_range(&self, message: &str) -> Box<dyn Any + Send>;
}
