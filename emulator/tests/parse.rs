//! Reads every PTX file of a folder, where one is named: `PTX_FILES=/some/folder cargo test -p ptx-emulator parse`.

use ptx_emulator::ptx::Module;

#[test]
fn all_kernels_of_the_named_folder_parse() {
    let Ok(folder) = std::env::var("PTX_FILES") else {
        return;
    };
    let mut num_kernels = 0;
    for entry in std::fs::read_dir(&folder).expect("the folder exists") {
        let path = entry.expect("readable").path();
        if path.extension().is_none_or(|extension| extension != "ptx") {
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("readable");
        let start = std::time::Instant::now();
        let module =
            Module::parse(&text).unwrap_or_else(|fault| panic!("{}: {fault}", path.display()));
        num_kernels += module.kernel_names().count();
        eprintln!("{}: {:?}", path.display(), start.elapsed());
    }
    assert!(num_kernels > 0, "{folder} holds no kernel");
}
