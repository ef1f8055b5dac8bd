//! Graphs: what a stream was captured with, done again in one call.

use std::ffi::c_ulonglong;

use super::registry::Handle;
use super::{Status, answer, refuse, work_call};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphInstantiateWithFlags(
    executable: *mut Handle,
    graph: Handle,
    flags: c_ulonglong,
) -> Status {
    work_call(|driver| {
        if flags != 0 {
            let why = format!("a graph with flags {flags}");
            return Err(refuse(Status::NOT_SUPPORTED, why));
        }
        let recorded = driver.graphs.get(graph)?.clone();
        // SAFETY: the caller's promise.
        unsafe { answer(executable, driver.executables.add(recorded)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphLaunch(executable: Handle, stream: Handle) -> Status {
    work_call(|driver| {
        let recorded = driver.executables.get(executable)?.clone();
        driver.check_not_captured(stream, "a graph")?;
        recorded
            .iter()
            .try_for_each(|operation| driver.work.give(operation.clone()))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphExecDestroy(executable: Handle) -> Status {
    work_call(|driver| driver.executables.remove(executable).map(|_| ()))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphDestroy(graph: Handle) -> Status {
    work_call(|driver| driver.graphs.remove(graph).map(|_| ()))
}
