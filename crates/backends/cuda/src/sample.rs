//! `Sample`: converts logits on the device to tokens.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use octavo_kernels::manifest;
use octavo_kernels::params::{
    Params, SAMPLING_ADJUST, SAMPLING_LOGPROBS, SAMPLING_MAX_TOP, SAMPLING_NONE, SAMPLING_PADDING, SamplingParams,
    SamplingRow,
};
use octavo_ops::BackendError;
use octavo_ops::sampling::{SampleBatch, SampleRow, SampledToken, Sampler, TokenCounts, TokenLogprobs};

use crate::arena::{Arena, Region};
use crate::build::{Instances, KernelId};
use crate::counts::Counts;
use crate::driver::{Event, Gpu, Pinned};
use crate::failed;
use crate::forward::Machine;
use crate::layout::{self, Layout, logits_stride};

/// Number of words in a row as the kernels read it.
const ROW_WORDS: usize = size_of::<SamplingRow>() / size_of::<u32>();

/// Alignment of arrays in words: 16 bytes.
const ALIGNMENT: usize = 4;

/// Kernels, in the order of their launches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SampleKernels {
    counts: KernelId,
    adjust: KernelId,
    scan: KernelId,
    weigh: KernelId,
    draw: KernelId,
    rank: KernelId,
    report: KernelId,
}

impl SampleKernels {
    pub(crate) fn new(instances: &mut Instances) -> Self {
        Self {
            counts: instances.id(manifest::table_runs()),
            adjust: instances.id(manifest::sampling_adjust()),
            scan: instances.id(manifest::sampling_scan()),
            weigh: instances.id(manifest::sampling_weigh()),
            draw: instances.id(manifest::sampling_draw()),
            rank: instances.id(manifest::sampling_rank()),
            report: instances.id(manifest::sampling_report()),
        }
    }

    /// Returns the kernels that the rows of a step need, in the order of their launches.
    fn needed(&self, rows: &[SamplingRow], vocab: u32) -> impl Iterator<Item = KernelId> {
        let any = |needs: &dyn Fn(&SamplingRow) -> bool| rows.iter().any(needs);
        [
            (self.adjust, any(&|row| row.flags & SAMPLING_ADJUST != 0)),
            (self.scan, true),
            (self.weigh, any(&SamplingRow::is_drawn)),
            (self.draw, any(&|row| row.is_filtered(vocab))),
            (self.rank, any(&|row| row.flags & SAMPLING_LOGPROBS != 0)),
            (self.report, any(&SamplingRow::reports_top)),
        ]
        .into_iter()
        .filter_map(|(kernel, is_needed)| is_needed.then_some(kernel))
    }
}

/// Lists of the rows, one array after the other. They are reused for their memory.
#[derive(Debug, Default)]
struct Lists {
    rows: Vec<SamplingRow>,
    bias_ids: Vec<u32>,
    bias_values: Vec<u32>,
    forbidden: Vec<u32>,
    listed: Vec<u32>,
    masks: Vec<u32>,
}

impl Lists {
    fn clear(&mut self) {
        self.rows.clear();
        self.arrays().into_iter().for_each(Vec::clear);
    }

    fn arrays(&mut self) -> [&mut Vec<u32>; 5] {
        let Self { bias_ids, bias_values, forbidden, listed, masks, .. } = self;
        [bias_ids, bias_values, forbidden, listed, masks]
    }

    /// Adds a row with its lists. `counts` are its entries among the counts.
    fn push(&mut self, row: &SampleRow<'_>, counts: Range<u32>, vocab: usize) {
        let mut out = plain(row);
        (out.bias_start, out.forbidden_start) = (self.bias_ids.len() as u32, self.forbidden.len() as u32);
        for &(id, bias) in row.logit_bias.iter().filter(|(id, _)| (*id as usize) < vocab) {
            self.bias_ids.push(id);
            self.bias_values.push(bias.to_bits());
        }
        self.forbidden.extend(row.forbidden.iter().filter(|&&id| (id as usize) < vocab));
        (out.bias_end, out.forbidden_end) = (self.bias_ids.len() as u32, self.forbidden.len() as u32);
        (out.counts_start, out.counts_end) = (counts.start, counts.end);
        if let Some(mask) = row.mask {
            let words = vocab.div_ceil(32);
            out.mask_row = (self.masks.len() / words) as u32;
            // Missing words allow nothing.
            self.masks.extend(mask.iter().copied().chain(std::iter::repeat(0)).take(words));
        }
        let lists =
            [out.bias_end - out.bias_start, out.forbidden_end - out.forbidden_start, out.counts_end - out.counts_start];
        let pending = row.pending.filter(|_| row.params.needs_counts());
        out.pending = pending.unwrap_or(SAMPLING_NONE);
        if row.mask.is_some() || lists != [0; 3] || pending.is_some() {
            out.flags |= SAMPLING_ADJUST;
        }
        out.listed_start = self.listed.len() as u32;
        if out.flags & SAMPLING_LOGPROBS != 0 {
            self.listed.extend(row.logprob_ids);
        }
        out.listed_end = self.listed.len() as u32;
        self.rows.push(out);
    }

    /// Returns the number of words of all arrays.
    fn words(&mut self) -> usize {
        let rows = (self.rows.len() * ROW_WORDS).next_multiple_of(ALIGNMENT);
        rows + self.arrays().iter().map(|array| array.len().next_multiple_of(ALIGNMENT)).sum::<usize>()
    }
}

/// Returns a row without its lists.
fn plain(row: &SampleRow<'_>) -> SamplingRow {
    let params = row.params;
    SamplingRow {
        seed: params.seed,
        output_position: row.output_position,
        flags: if params.logprobs.is_some() { SAMPLING_LOGPROBS } else { 0 },
        temperature: params.temperature,
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        repetition_penalty: params.repetition_penalty,
        forced: row.forced.unwrap_or(SAMPLING_NONE),
        top: params.logprobs.unwrap_or(0),
        ..SamplingRow::GREEDY
    }
}

/// Returns the number of tokens that a row reports beside its own.
fn reported(row: &SampleRow<'_>, vocab: usize) -> usize {
    match row.params.logprobs {
        None => 0,
        Some(_) if !row.logprob_ids.is_empty() => row.logprob_ids.len(),
        Some(top) => (top as usize).min(vocab),
    }
}

/// Begin and end of what a step launches at once. The device may be idle in between, while the host fills masks.
struct Span {
    begin: Event,
    end: Event,
}

impl Span {
    fn new(gpu: &Arc<Gpu>) -> Result<Self, BackendError> {
        Ok(Self { begin: Event::timed(gpu)?, end: Event::timed(gpu)? })
    }

    fn time(&self) -> Result<Duration, BackendError> {
        Ok(self.end.since(&self.begin)?)
    }
}

/// Host memory of a step that is being sampled.
struct Slot {
    /// Rows and lists to be copied to the device.
    input: Pinned,
    /// Tokens and reported log-probabilities, valid when the sampling has ended.
    output: Pinned,
    forward: Span,
    sampling: Span,
    /// Rows of the step.
    rows: Vec<SamplingRow>,
    /// Maximum number of tokens that a row reports beside its own.
    stride: usize,
    /// Tokens that were sampled on the host, by row.
    on_host: Vec<(usize, SampledToken)>,
}

impl Slot {
    fn new(gpu: &Arc<Gpu>, regions: &layout::Sampling) -> Result<Self, BackendError> {
        let pinned = |region: Region| Pinned::new(gpu, region.bytes as usize / size_of::<u32>());
        Ok(Self {
            input: pinned(regions.input)?,
            output: pinned(regions.output)?,
            forward: Span::new(gpu)?,
            sampling: Span::new(gpu)?,
            rows: Vec::new(),
            stride: 0,
            on_host: Vec::new(),
        })
    }

    fn flags(&self) -> u32 {
        self.rows.iter().fold(0, |flags, row| flags | row.flags)
    }

    /// Returns the number of words of the results.
    fn words(&self) -> usize {
        self.rows.len() * if self.flags() & SAMPLING_LOGPROBS != 0 { 5 + 2 * self.stride } else { 1 }
    }

    /// Reads the results of a row; `None` if the host has sampled it.
    fn token(&self, index: usize) -> Option<SampledToken> {
        let (flags, rows, stride) = (self.rows[index].flags, self.rows.len(), self.stride);
        let logprobs = (flags & SAMPLING_LOGPROBS != 0).then(|| {
            let of = |array: usize| self.output[array * rows + index];
            let start = |array: usize| array * rows + index * stride;
            let count = (of(4) as usize).min(stride);
            let ids = &self.output[start(5)..][..count];
            let values = &self.output[start(5 + stride)..][..count];
            let top = ids.iter().zip(values).map(|(&id, &value)| (id, f32::from_bits(value))).collect();
            TokenLogprobs { logprob: f32::from_bits(of(2)), rank: of(3), top }
        });
        (flags & SAMPLING_PADDING == 0).then(|| SampledToken { id: self.output[index], logprobs })
    }
}

/// Samples on the device. A row whose lists or reports exceed the memory is sampled on the host, with the same result.
///
/// Two steps may be under way: while the tokens of one are copied to the host, the next one reads them on the device.
pub(crate) struct Sampling {
    /// Kernels; `None` if the program predicts no tokens.
    kernels: Option<SampleKernels>,
    logits: u64,
    adjusted: u64,
    /// Scratch memory for so many rows: that which is zero between steps, and the rest.
    room: usize,
    zeroed: u64,
    scratch: u64,
    /// Device address of rows and lists, and of the results. Each step reads and writes them in turn.
    input: u64,
    output: u64,
    vocab: usize,
    lists: Lists,
    counts: Counts,
    /// Counts with the token of the step before, for rows that are sampled on the host.
    counts_on_host: Vec<(usize, TokenCounts)>,
    sampler: Sampler,
    slots: [Slot; 2],
    /// Slot of the next step.
    next: usize,
    /// Number of steps whose tokens have not been taken.
    under_way: usize,
    /// Time of the step whose tokens were taken last.
    step_time: Option<Duration>,
    /// Number of rows of the latest step, to which the next may refer.
    drawn: usize,
}

impl Sampling {
    /// Creates it. `logits` is the address of the rows that `Logits` writes.
    pub(crate) fn new(
        machine: &Machine,
        kernels: Option<SampleKernels>,
        logits: u64,
        arena: &Arena,
        layout: &Layout,
        vocab: usize,
    ) -> Result<Self, BackendError> {
        let regions = &layout.sampling;
        let counts_at = [arena.at(regions.counts.0), arena.at(regions.counts.1)];
        Ok(Self {
            kernels,
            logits,
            adjusted: arena.at(regions.adjusted),
            room: regions.room,
            zeroed: arena.at(regions.zeroed),
            scratch: arena.at(regions.scratch),
            input: arena.at(regions.input),
            output: arena.at(regions.output),
            vocab,
            lists: Lists::default(),
            counts: Counts::new(
                &machine.launcher.gpu,
                regions.counts_room,
                counts_at,
                kernels.map(|kernels| kernels.counts),
            )?,
            counts_on_host: Vec::new(),
            sampler: Sampler::new(),
            slots: [Slot::new(&machine.launcher.gpu, regions)?, Slot::new(&machine.launcher.gpu, regions)?],
            next: 0,
            under_way: 0,
            step_time: None,
            drawn: 0,
        })
    }

    /// Returns the number of rows of the step that was sampled last, whose tokens are still on the device.
    pub(crate) fn drawn(&self) -> usize {
        self.drawn
    }

    /// Records the begin of the next step, before its forward pass is launched.
    pub(crate) fn begin_forward(&self) -> Result<(), BackendError> {
        Ok(self.slots[self.next].forward.begin.record()?)
    }

    /// Records the end of the forward pass of the next step.
    pub(crate) fn end_forward(&self) -> Result<(), BackendError> {
        Ok(self.slots[self.next].forward.end.record()?)
    }

    /// Returns the time that the device worked on the step whose tokens were taken last.
    pub(crate) fn step_time(&self) -> Option<Duration> {
        self.step_time
    }

    /// Starts to sample a token for each row.
    pub(crate) fn start(&mut self, machine: &Machine, batch: &SampleBatch<'_>) -> Result<(), BackendError> {
        let drawn = std::mem::take(&mut self.drawn);
        if batch.rows.iter().filter_map(|row| row.pending).any(|row| row as usize >= drawn) {
            return Err(failed("a row counts a token that was not drawn"));
        }
        if self.under_way == self.slots.len() {
            return Err(failed("the tokens of the step before the last have not been taken"));
        }
        let launched = self.launch(machine, batch);
        if launched.is_err() {
            // Launched work may use the slot's memory, which the next step gets. If waiting fails too, nothing runs any
            // more.
            let _ = machine.launcher.gpu.synchronize();
        }
        launched?;
        self.drawn = batch.rows.len();
        self.next = 1 - self.next;
        self.under_way += 1;
        Ok(())
    }

    fn launch(&mut self, machine: &Machine, batch: &SampleBatch<'_>) -> Result<(), BackendError> {
        self.gather(batch);
        self.slots[self.next].sampling.begin.record()?;
        self.counts.send(machine)?;
        self.count_pending(machine, batch)?;
        if !batch.rows.is_empty() {
            let kernels = self.kernels.ok_or_else(|| failed("the model predicts no tokens"))?;
            let params = self.upload(machine)?;
            for kernel in kernels.needed(&self.slots[self.next].rows, params.vocab) {
                machine.launch(kernel, params.grid(), &params)?;
            }
            self.draw_on_host(machine, batch)?;
            let slot = &mut self.slots[self.next];
            let words = slot.words();
            machine.launcher.gpu.fetch(&mut slot.output, words, self.output)?;
        }
        Ok(self.slots[self.next].sampling.end.record()?)
    }

    /// Counts the tokens of the step before for the rows that are sampled on the host, before others take their place on the
    /// device.
    fn count_pending(&mut self, machine: &Machine, batch: &SampleBatch<'_>) -> Result<(), BackendError> {
        self.counts_on_host.clear();
        for (index, row) in self.slots[self.next].rows.iter().enumerate() {
            let asked = &batch.rows[index];
            let Some(pending) = asked.pending.filter(|_| row.flags & SAMPLING_PADDING != 0) else { continue };
            let mut token = [0];
            machine.launcher.gpu.download(&mut token, self.output + u64::from(pending) * size_of::<u32>() as u64)?;
            let mut counts = asked.counts.cloned().unwrap_or_default();
            counts.push(token[0]);
            self.counts_on_host.push((index, counts));
        }
        Ok(())
    }

    /// Collects the rows, which are stored in the slot, and their lists.
    fn gather(&mut self, batch: &SampleBatch<'_>) {
        let (lists, slot) = (&mut self.lists, &mut self.slots[self.next]);
        lists.clear();
        self.counts.begin();
        slot.on_host.clear();
        slot.stride = 0;
        let room = slot.output.len() / batch.rows.len().max(1);
        let most = (room.saturating_sub(5) / 2).min(SAMPLING_MAX_TOP as usize);
        for (index, row) in batch.rows.iter().enumerate() {
            let wanted = reported(row, self.vocab);
            let brought = row.logit_bias.len() * 2 + row.forbidden.len() + row.logprob_ids.len();
            let masked = row.mask.map_or(0, |_| self.vocab.div_ceil(32));
            // Each of the five lists may be followed by padding; the remaining rows need their own words.
            let rest = (batch.rows.len() - index) * ROW_WORDS + 8 * ALIGNMENT;
            let fits = wanted <= most && lists.words() + rest + brought + masked <= slot.input.len();
            match self.counts.place(row).filter(|_| fits) {
                None => lists.rows.push(SamplingRow { flags: SAMPLING_PADDING, ..SamplingRow::GREEDY }),
                Some(counts) => {
                    lists.push(row, counts, self.vocab);
                    slot.stride = slot.stride.max(wanted);
                }
            }
        }
        std::mem::swap(&mut lists.rows, &mut slot.rows);
    }

    /// Copies rows and lists to the device. Returns the parameters of the launches.
    fn upload(&mut self, machine: &Machine) -> Result<SamplingParams, BackendError> {
        let (lists, slot) = (&mut self.lists, &mut self.slots[self.next]);
        let rows = slot.rows.len();
        let mut end = 0;
        for row in &slot.rows {
            let words = row.bytes().as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word));
            slot.input[end..end + ROW_WORDS].iter_mut().zip(words).for_each(|(out, word)| *out = word);
            end += ROW_WORDS;
        }
        let arrays = lists.arrays().map(|array| {
            end = end.next_multiple_of(ALIGNMENT);
            let start = end;
            end += array.len();
            slot.input[start..end].copy_from_slice(array);
            if array.is_empty() { 0 } else { self.input + (start * size_of::<u32>()) as u64 }
        });
        machine.launcher.gpu.upload(self.input, &slot.input, end)?;
        let [bias_ids, bias_values, forbidden_ids, listed_ids, masks] = arrays;
        let [count_ids, count_times] = self.counts.arrays();
        let output = |words: usize| self.output + (words * size_of::<u32>()) as u64;
        let params = SamplingParams {
            logits: self.logits,
            adjusted: self.adjusted,
            rows_of: self.input,
            masks,
            bias_ids,
            bias_values,
            forbidden_ids,
            count_ids,
            count_times,
            listed_ids,
            ids: output(0),
            status: output(rows),
            logprobs: output(2 * rows),
            ranks: output(3 * rows),
            top_counts: output(4 * rows),
            top_ids: output(5 * rows),
            top_logprobs: output((5 + slot.stride) * rows),
            rows: rows as u32,
            vocab: self.vocab as u32,
            row_stride: logits_stride(self.vocab) as u32,
            mask_words: self.vocab.div_ceil(32) as u32,
            top_stride: slot.stride as u32,
            segment: SamplingParams::segment_for(rows as u32, self.vocab as u32),
            ..SamplingParams::default()
        };
        Ok(params.with_scratch(self.room, self.zeroed, self.scratch))
    }

    /// Samples the rows for which there was no memory and copies the tokens to the device. Waits for the step.
    fn draw_on_host(&mut self, machine: &Machine, batch: &SampleBatch<'_>) -> Result<(), BackendError> {
        let slot = &mut self.slots[self.next];
        let rows = slot.rows.iter().enumerate().filter(|(_, row)| row.flags & SAMPLING_PADDING != 0);
        for (index, _) in rows {
            let mut words = vec![0; self.vocab];
            let row = index as u64 * logits_stride(self.vocab) * size_of::<f32>() as u64;
            machine.launcher.gpu.download(&mut words, self.logits + row)?;
            let logits: Vec<f32> = words.into_iter().map(f32::from_bits).collect();
            let mut asked = batch.rows[index];
            if let Some((_, counts)) = self.counts_on_host.iter().find(|(of, _)| *of == index) {
                asked.counts = Some(counts);
            }
            let token = self.sampler.sample(&logits, &asked);
            machine.launcher.gpu.write(self.output + (index * size_of::<u32>()) as u64, &[token.id])?;
            slot.on_host.push((index, token));
        }
        Ok(())
    }

    /// Waits for the tokens of the oldest step under way and reads them.
    pub(crate) fn take(&mut self, out: &mut Vec<SampledToken>) -> Result<(), BackendError> {
        out.clear();
        if self.under_way == 0 {
            return Err(failed("no step is being sampled"));
        }
        let slot = &mut self.slots[(self.next + self.under_way) % 2];
        self.under_way -= 1;
        slot.sampling.end.wait()?;
        self.step_time = Some(slot.forward.time()? + slot.sampling.time()?);
        let mut on_host = std::mem::take(&mut slot.on_host).into_iter();
        for (index, row) in slot.rows.iter().enumerate() {
            let token = slot.token(index).or_else(|| on_host.next().map(|(_, token)| token));
            let token = token.ok_or_else(|| failed(format!("row {index} was not drawn")))?;
            let given = row.flags & SAMPLING_PADDING != 0 || row.forced != SAMPLING_NONE;
            if token.id as usize >= self.vocab && !given {
                return Err(failed(format!("row {index} drew the token {}, of {}", token.id, self.vocab)));
            }
            out.push(token);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use octavo_ops::sampling::SampleParams;

    use super::*;

    #[test]
    fn lists_are_told_by_ranges() {
        let greedy = SampleParams::default();
        let penalised = SampleParams { repetition_penalty: 1.2, logprobs: Some(2), ..greedy };
        let mask = [0b1010];
        let mut lists = Lists::default();
        lists.push(&SampleRow::new(&greedy), 0..0, 40);
        lists.push(
            &SampleRow {
                logit_bias: &[(3, 1.5), (99, 2.0)],
                forbidden: &[7, 40],
                mask: Some(&mask),
                logprob_ids: &[9],
                ..SampleRow::new(&penalised)
            },
            5..8,
            40,
        );
        assert_eq!(lists.rows[0], SamplingRow::GREEDY);
        let row = lists.rows[1];
        assert_eq!(row.flags, SAMPLING_ADJUST | SAMPLING_LOGPROBS);
        assert_eq!((row.bias_start..row.bias_end, row.forbidden_start..row.forbidden_end), (0..1, 0..1));
        assert_eq!((row.counts_start..row.counts_end, row.listed_start..row.listed_end), (5..8, 0..1));
        assert_eq!((row.mask_row, &lists.masks[..]), (0, &[0b1010, 0][..]));
        assert_eq!(lists.words(), 48 + 4 * 5);
    }

    #[test]
    fn a_token_that_is_not_known_yet_changes_logits_if_there_is_a_penalty() {
        let greedy = SampleParams::default();
        let penalised = SampleParams { presence_penalty: 0.5, ..greedy };
        let mut lists = Lists::default();
        lists.push(&SampleRow { pending: Some(3), ..SampleRow::new(&penalised) }, 0..0, 40);
        lists.push(&SampleRow { pending: Some(3), ..SampleRow::new(&greedy) }, 0..0, 40);
        assert_eq!((lists.rows[0].pending, lists.rows[0].flags), (3, SAMPLING_ADJUST));
        assert_eq!(lists.rows[1], SamplingRow::GREEDY);
    }
}
