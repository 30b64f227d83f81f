//! Compares checkpoints with an encoder of images with what PyTorch computed for them: encoder outputs, positions and
//! logits, with images that are whole or cut by chunks.

use octavo_backend_candle::CandleBackend;
use octavo_backend_cuda::{CudaBackend, CudaConfig, testing};
use octavo_models::{
    Checkpoint, EncodedImage, ImageGrid, ImagePositions, ImageSpan, Programs, VisionConfig, build_programs,
};
use octavo_ops::testing::in_each_group;
use octavo_ops::{Backend, BlockTables, Channel, EncodeBatch, InjectMode, InjectedRow, Op, StepBatch};
use safetensors::SafeTensors;

use crate::limits::{CANDLE, DEFECT, Difference, largest_mean, limit};
use crate::support::{Device, checkpoint, testdata, words};

const BLOCK: usize = 16;
/// Number of blocks of each KV group.
const BLOCKS: usize = 16;
/// Number of rows of the media cache.
const MEDIA: usize = 48;

/// PyTorch's results for a prompt.
struct Case {
    ids: Vec<u32>,
    logits: Vec<f32>,
    patches: Vec<u8>,
    grids: Vec<ImageGrid>,
    /// Rows of the media cache, with all their columns.
    rows: Vec<Vec<f32>>,
    /// Positions `[3,T]`, if the model has three.
    positions: Vec<u32>,
}

impl Case {
    fn read(checkpoint: &str, name: &str, hidden: usize) -> Self {
        let bytes = std::fs::read(testdata(checkpoint).join("golden.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let floats = |part: &str| words(&file, &format!("{name}.{part}"), f32::from_le_bytes);
        let integers = |part: &str| words(&file, &format!("{name}.{part}"), u32::from_le_bytes);
        let (ids, logits) = (integers("input_ids"), floats("logits"));
        if name == "text" {
            let positions = (0..3).flat_map(|_| 0..ids.len() as u32).collect();
            return Self { ids, logits, patches: vec![], grids: vec![], rows: vec![], positions };
        }
        let has = |part: &str| file.names().contains(&format!("{name}.{part}").as_str());
        let parts = ["merged", "deepstack.0", "deepstack.1"].into_iter().filter(|part| has(part));
        let parts: Vec<_> = parts.map(floats).collect();
        let row = |row: usize| parts.iter().flat_map(|part| part[row * hidden..][..hidden].to_vec()).collect();
        Self {
            rows: (0..parts[0].len() / hidden).map(row).collect(),
            ids,
            logits,
            patches: file.tensor(&format!("{name}.patches")).unwrap().data().to_vec(),
            grids: integers("grids")
                .chunks(2)
                .map(|g| ImageGrid { rows: g[0] as usize, cols: g[1] as usize })
                .collect(),
            positions: if has("positions") { integers("positions") } else { vec![] },
        }
    }

    /// Returns the images' spans, which the ids show.
    fn spans(&self, vision: &VisionConfig) -> Vec<ImageSpan> {
        let is_first = |&at: &usize| self.ids[at] == vision.tokens.image && self.ids[at - 1] != vision.tokens.image;
        let starts = (1..self.ids.len()).filter(is_first);
        let merge = vision.merge_size;
        let span = |(start, grid): (usize, &ImageGrid)| ImageSpan {
            start: start as u32,
            rows: (grid.rows / merge) as u32,
            cols: (grid.cols / merge) as u32,
        };
        starts.zip(&self.grids).map(span).collect()
    }

    /// Returns the rows of the cache that the images take, in an order without a pattern.
    fn stored(&self) -> Vec<u32> {
        (0..self.rows.len() as u32).map(|row| (row * 29 + 3) % MEDIA as u32).collect()
    }
}

/// A defect that the comparison must detect.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Defect {
    None,
    /// Each token has its index as all its positions.
    Positions,
    /// The decoder takes the deepstack outputs in the wrong order.
    Deepstack,
    /// The grids are transposed when they are encoded.
    Grid,
    /// The images' rows are not injected.
    Embeddings,
    /// The patches are in rows of the image, not in blocks of merged patches.
    Blocks,
    /// Each patch has the learned position of the patch before it.
    Taps,
    /// Tokens of images see only those before them.
    Spans,
}

/// A loaded model with an encoder, and one sequence.
struct Session {
    backend: Box<dyn Backend>,
    vision: VisionConfig,
    /// Number of positions of a token.
    streams: usize,
    has_spans: bool,
    /// Number of KV groups.
    groups: usize,
    defect: Defect,
}

impl Session {
    fn new(mut backend: Box<dyn Backend>, checkpoint: &Checkpoint, defect: Defect) -> Self {
        let Programs { mut decoder, encoder } = build_programs(checkpoint).unwrap();
        if defect == Defect::Deepstack {
            let hidden = checkpoint.config().hidden_size;
            for op in &mut decoder.ops {
                if let Op::InjectRows(op) = op
                    && op.mode == InjectMode::Add
                {
                    op.column = 3 * hidden - op.column;
                }
            }
        }
        backend.load(&decoder, checkpoint, &mut |_| {}).unwrap();
        backend.load_encoder(&encoder.unwrap(), checkpoint, &mut |_| {}).unwrap();
        backend.allocate_kv(BLOCK, 1 + BLOCKS * decoder.kv_groups.len()).unwrap();
        backend.allocate_media(MEDIA).unwrap();
        let (streams, has_spans) = (decoder.position_streams(), decoder.has_spans());
        Self {
            backend,
            vision: checkpoint.config().vision.clone().unwrap(),
            streams,
            has_spans,
            groups: decoder.kv_groups.len(),
            defect,
        }
    }

    /// Encodes the images and returns their rows of the cache.
    fn encode(&mut self, case: &Case) -> Vec<f32> {
        let stored = case.stored();
        let (mut patches, mut rows) = (&case.patches[..], &stored[..]);
        let mut images = Vec::new();
        for &ImageGrid { rows: height, cols: width } in &case.grids {
            let (image, rest) = patches.split_at(height * width * self.vision.patch_elements());
            let (store_rows, rest_rows) = rows.split_at(height * width / self.vision.merged_patches());
            (patches, rows) = (rest, rest_rows);
            let grid = match self.defect {
                Defect::Grid => ImageGrid { rows: width, cols: height },
                _ => ImageGrid { rows: height, cols: width },
            };
            images.push(EncodedImage { grid, patches: image, store_rows });
        }
        let mut batch =
            EncodeBatch { channels: vec![Channel { shift: 127.5, divisor: 127.5 }; 3], ..EncodeBatch::default() };
        self.vision.fill(&images, &mut batch).unwrap();
        match self.defect {
            Defect::Blocks => self.in_rows(&mut batch),
            Defect::Taps => batch.taps.rotate_right(1),
            _ => {}
        }
        self.backend.encode(&batch).unwrap();
        self.backend.media(&stored).unwrap()
    }

    /// Sorts the patches of images without rotary positions by their row in the table of positions.
    fn in_rows(&self, batch: &mut EncodeBatch) {
        let (cols, patches) = (self.vision.patch_elements(), self.vision.table_side.pow(2));
        for image in 0..batch.taps.len() / patches {
            let range = image * patches..(image + 1) * patches;
            let mut order: Vec<usize> = range.clone().collect();
            order.sort_by_key(|&patch| batch.taps[patch][0].row);
            let bytes: Vec<u8> = order.iter().flat_map(|&p| batch.patches[p * cols..][..cols].to_vec()).collect();
            let taps: Vec<_> = order.iter().map(|&patch| batch.taps[patch]).collect();
            batch.patches[range.start * cols..range.end * cols].copy_from_slice(&bytes);
            batch.taps[range].copy_from_slice(&taps);
        }
    }

    /// Runs the prompt in chunks of the given size and returns the logits of every token. A chunk is longer if the tokens of
    /// an image see each other.
    fn run(&mut self, case: &Case, chunk: usize) -> Vec<f32> {
        let spans = case.spans(&self.vision);
        let positions = ImagePositions::new(spans.iter().copied());
        let stored = case.stored();
        let first_row = |at: usize| spans[..at].iter().map(|span| span.rows * span.cols).sum::<u32>();
        let table: Vec<u32> = (1..16).rev().collect();
        let mut logits = Vec::new();
        let mut start = 0;
        while start < case.ids.len() {
            let mut end = (start + chunk).min(case.ids.len());
            if self.has_spans {
                end = positions.seen_end(end as u32 - 1) as usize;
            }
            let seen_end = |place: usize| match self.defect {
                Defect::Spans => place as u32 + 1,
                _ => positions.seen_end(place as u32),
            };
            let slot = |p: usize| table[p / BLOCK] * BLOCK as u32 + (p % BLOCK) as u32;
            let at = |index: usize| match self.defect {
                Defect::Positions => [index as u32; 3],
                _ if self.streams == 1 => [index as u32; 3],
                _ => positions.at(index as u32),
            };
            let media = |(index, span): (usize, &ImageSpan)| {
                let tokens = span.start.max(start as u32)..span.end().min(end as u32);
                let (first, begin) = (first_row(index), span.start);
                tokens.map(move |token| (token, (first + token - begin) as usize)).collect::<Vec<_>>()
            };
            let injected = spans.iter().enumerate().flat_map(media);
            let injected = injected.map(|(token, row)| InjectedRow { row: token - start as u32, media: stored[row] });
            let mut batch = StepBatch {
                token_ids: case.ids[start..end].to_vec(),
                positions: (0..self.streams)
                    .flat_map(|axis| (start..end).map(move |i| (axis, i)))
                    .map(|(axis, i)| at(i)[axis])
                    .collect(),
                slot_mapping: vec![(start..end).map(slot).collect()],
                block_tables: vec![BlockTables::from_iter([table.clone()])],
                query_start: vec![0, (end - start) as u32],
                seq_lens: vec![end as u32],
                sampled_rows: (0..(end - start) as u32).collect(),
                seats: vec![0],
                injected: if self.defect == Defect::Embeddings { vec![] } else { injected.collect() },
                seen_ends: if self.has_spans { (start..end).map(seen_end).collect() } else { vec![] },
                ..StepBatch::default()
            };
            in_each_group(&mut batch, self.groups, BLOCKS, BLOCK);
            self.backend.forward(&batch).unwrap();
            logits.extend(self.backend.logits().unwrap());
            start = end;
        }
        logits
    }
}

/// Checks a checkpoint on a backend. `golden` is the checkpoint with PyTorch's results, `limit` the limit by what is compared.
fn check_on(name: &str, golden: &str, device: &str, backend: Box<dyn Backend>, limit: impl Fn(&str) -> Difference) {
    let checkpoint = checkpoint(name);
    let hidden = checkpoint.config().hidden_size;
    let mut session = Session::new(backend, &checkpoint, Defect::None);
    let (logits, rows) = (limit(name), limit(&format!("{name} rows")));
    for prompt in ["text", "one", "two", "decode"] {
        let case = Case::read(golden, prompt, hidden);
        if prompt != "text" {
            let found = session.encode(&case);
            let parts = case.rows[0].len() / hidden;
            for part in 0..parts {
                let of = |rows: &[f32]| -> Vec<f32> {
                    rows.chunks(parts * hidden).flat_map(|row| row[part * hidden..][..hidden].to_vec()).collect()
                };
                Difference::between(&of(&found), &of(&case.rows.concat()))
                    .assert_within(rows, &format!("{name} rows on {device}, {prompt}, part {part}"));
            }
        }
        for chunk in [case.ids.len(), 7, 1] {
            Difference::between(&session.run(&case, chunk), &case.logits)
                .assert_within(logits, &format!("{name} on {device}, {prompt}, chunks of {chunk}"));
        }
    }
}

fn check(name: &str, golden: &str) {
    for Device { name: device, backend, isa } in Device::all() {
        check_on(name, golden, device, backend, |what| limit(what, isa));
    }
    let gpu = CudaBackend::new(CudaConfig { graphs: true, ..testing::config() }).unwrap();
    check_on(name, golden, "the stand-in of a GPU", Box::new(gpu), |_| CANDLE);
}

#[test]
fn qwen3_vl() {
    check("qwen3-vl", "qwen3-vl");
}

#[test]
fn qwen3_vl_as_transformers_4_wrote_it_with_a_tied_head() {
    check("qwen3-vl-tied", "qwen3-vl-tied");
}

#[test]
fn qwen3_vl_as_a_gguf_file_with_its_mmproj_file() {
    check("qwen3-vl-gguf", "qwen3-vl");
}

/// Both forms hold the same values, so that the reference backend computes the same bits.
#[test]
fn a_gguf_file_with_its_mmproj_file_computes_what_the_folder_does() {
    let [folder, gguf] = ["qwen3-vl", "qwen3-vl-gguf"].map(|name| {
        let checkpoint = checkpoint(name);
        let case = Case::read("qwen3-vl", "two", checkpoint.config().hidden_size);
        let mut session = Session::new(Box::new(CandleBackend::new()), &checkpoint, Defect::None);
        (session.encode(&case), session.run(&case, case.ids.len()))
    });
    assert_eq!(folder, gguf);
}

#[test]
fn positions_are_those_of_the_reference() {
    let checkpoint = checkpoint("qwen3-vl");
    let vision = checkpoint.config().vision.as_ref().unwrap();
    for prompt in ["text", "one", "two", "decode"] {
        let case = Case::read("qwen3-vl", prompt, checkpoint.config().hidden_size);
        let positions = ImagePositions::new(case.spans(vision));
        let tokens = case.ids.len() as u32;
        let found: Vec<u32> = (0..3)
            .flat_map(|axis| (0..tokens).map(move |i| (axis, i)))
            .map(|(axis, i)| positions.at(i)[axis])
            .collect();
        assert_eq!(found, case.positions, "{prompt}");
    }
}

#[test]
fn idefics3() {
    check("idefics3", "idefics3");
}

/// Checks that the comparison detects each defect on every backend.
fn sees(name: &str, defects: &[Defect]) {
    let (checkpoint, least) = (checkpoint(name), DEFECT * largest_mean(name));
    for &defect in defects {
        let case = Case::read(name, "two", checkpoint.config().hidden_size);
        for Device { name: device, backend, .. } in Device::all() {
            let mut session = Session::new(backend, &checkpoint, defect);
            session.encode(&case);
            let Difference { mean, .. } = Difference::between(&session.run(&case, case.ids.len()), &case.logits);
            println!("{name} on {device}, {defect:?}: {mean:.1e} in the mean, {:.1} limits", DEFECT * mean / least);
            assert!(mean >= least, "{name} on {device}, {defect:?}: {mean} is below {least}");
        }
    }
}

#[test]
fn defects_of_qwen3_vl_are_seen() {
    sees("qwen3-vl", &[Defect::Positions, Defect::Deepstack, Defect::Grid, Defect::Embeddings]);
}

#[test]
fn defects_of_idefics3_are_seen() {
    sees("idefics3", &[Defect::Blocks, Defect::Taps, Defect::Embeddings]);
}

#[test]
fn gemma3() {
    check("gemma3-images", "gemma3-images");
}

#[test]
fn gemma3_as_a_gguf_file_with_its_mmproj_file() {
    check("gemma3-images-gguf", "gemma3-images");
}

#[test]
fn defects_of_gemma3_are_seen() {
    sees("gemma3-images", &[Defect::Blocks, Defect::Taps, Defect::Embeddings, Defect::Spans]);
}

#[test]
fn an_encoder_with_exact_positions_takes_no_other_grid() {
    let checkpoint = checkpoint("idefics3");
    let vision = checkpoint.config().vision.as_ref().unwrap();
    let tokens = |rows, cols| vision.image_tokens(ImageGrid { rows, cols });
    assert_eq!((tokens(6, 6), tokens(6, 3), tokens(3, 6), tokens(12, 12)), (Some(4), None, None, None));
}
