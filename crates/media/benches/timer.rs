//! Times one run of a stage at a time, for `beside_python.py`: reads lines `STAGE FILE` and answers each with the seconds of
//! one run.
//!
//! | stage | from | to |
//! |---|---|---|
//! | `decode` | the file | pixels |
//! | `process` | pixels | normalised patches |
//! | `whole` | the file | normalised patches |
//! | `bytes` | the file | patches of bytes, as they are kept |

mod qwen3_vl;

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use octavo_media::decode::{decode, inspect};
use octavo_media::{RgbImage, Views};

use crate::qwen3_vl::processor;

fn decoded(file: &[u8]) -> RgbImage {
    let header = inspect(file, 0).expect("an image");
    decode(file, &header, [255; 3]).expect("an image")
}

fn cut(image: RgbImage) -> Views {
    processor().process(image, &|| false).expect("a size that can be processed").expect("not cancelled")
}

fn normalized(views: &Views) -> Vec<f32> {
    let [patches] = views.patches() else { panic!("an image of one view") };
    let mut rows = vec![0.0; patches.len() * patches.layout().values()];
    patches.normalized(0..patches.len(), &mut rows);
    rows
}

fn timed<T>(work: impl FnOnce() -> T) -> Duration {
    let begun = Instant::now();
    let result = work();
    let time = begun.elapsed();
    drop(result);
    time
}

fn main() {
    // `cargo test` also builds and runs benches, but only for their smoke tests; this one has none.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let mut files: HashMap<String, Vec<u8>> = HashMap::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line");
        let (stage, path) = line.split_once(' ').expect("a stage and a file");
        let file = &*files.entry(path.to_owned()).or_insert_with(|| std::fs::read(path).expect("the file"));
        let time = match stage {
            "decode" => timed(|| decoded(file)),
            "process" => {
                let image = decoded(file);
                timed(|| normalized(&cut(image)))
            }
            "whole" => timed(|| normalized(&cut(decoded(file)))),
            "bytes" => timed(|| cut(decoded(file))),
            _ => panic!("unknown stage {stage}"),
        };
        println!("{}", time.as_secs_f64());
        std::io::stdout().flush().expect("a reader");
    }
}
