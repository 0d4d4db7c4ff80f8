//! Which process this is, without asking the system each time: gradients ask in every hook, and where system calls are
//! intercepted (gVisor) one costs more than all else there.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static ID: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    ID.store(std::process::id(), Ordering::Relaxed);
}

/// The id of this process; a fork that libc has made is noticed.
pub(crate) fn id() -> u32 {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        in_child();
        // SAFETY: the handler stores a number, which a child of a process with several threads may do.
        let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) } != 0;
        if failed {
            ID.store(0, Ordering::Relaxed);
        }
    });
    match ID.load(Ordering::Relaxed) {
        0 => std::process::id(),
        id => id,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_is_this_process_and_its_child_is_another() {
        assert_eq!(super::id(), std::process::id());
        // SAFETY: the child calls what is safe there and leaves at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_noticed = super::id() == std::process::id();
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(!is_noticed)) };
        }
        let mut status = -1;
        // SAFETY: a child of this process, and a pointer to an int.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
