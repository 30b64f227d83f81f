use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::{ImageHash, ImageInput, ImageSpan, KvCacheSpec, KvGroupSpec, PromptImage};

fn spec(block_size: usize, blocks: usize, kinds: &[KvKind]) -> KvCacheSpec {
    let groups = kinds.iter().map(|&kind| KvGroupSpec { layers: 1, kind }).collect();
    KvCacheSpec { block_size, block_bytes: 1, blocks, groups }
}

/// Returns a cache with one group that sees all tokens.
fn full(block_size: usize, blocks: usize) -> KvCache {
    caching(&spec(block_size, blocks, &[KvKind::Full]))
}

fn salted(salt: Option<&str>) -> Extras {
    Extras { salt: salt.map(Arc::from), ..Extras::default() }
}

fn caching(spec: &KvCacheSpec) -> KvCache {
    KvCache::new(spec.blocks, KvLayout::new(spec, true))
}

/// A sequence that is looked up, gets blocks for all its tokens and is computed at once.
struct Holder {
    history: TokenHistory,
    kv: SequenceKv,
}

impl Holder {
    fn new(cache: &mut KvCache, prompt: &[u32], salt: Option<&str>) -> Self {
        let history = TokenHistory::new(prompt.into());
        let mut kv = SequenceKv::new(cache.layout(), &history, salted(salt));
        let hit = cache.lookup(&mut kv, &history, usize::MAX);
        assert!(cache.fits(hit, history.len(), 0, 0.0));
        cache.attach(&mut kv, hit);
        assert!(cache.grow(&mut kv, history.len()));
        cache.commit(&mut kv, &history, history.len());
        Self { history, kv }
    }

    fn hit(cache: &mut KvCache, prompt: &[u32], salt: Option<&str>) -> usize {
        let history = TokenHistory::new(prompt.into());
        let mut kv = SequenceKv::new(cache.layout(), &history, salted(salt));
        cache.lookup(&mut kv, &history, usize::MAX).tokens
    }

    fn blocks(&self) -> &[BlockId] {
        &self.kv.tables[0]
    }
}

fn free_list(cache: &KvCache) -> Vec<BlockId> {
    cache.pool.free_list().collect()
}

fn tokens(from: u32, count: u32) -> Vec<u32> {
    (from..from + count).collect()
}

/// Reproduces vLLM's `test_evict`, with 10 usable blocks of 16 tokens.
#[test]
fn freed_blocks_queue_as_in_vllm_evict() {
    let mut cache = full(16, 11);
    let mut a = Holder::new(&mut cache, &tokens(0, 5 * 16 + 7), None);
    assert_eq!(a.blocks(), [1, 2, 3, 4, 5, 6]);
    let mut b = Holder::new(&mut cache, &tokens(1000, 3 * 16), None);
    assert_eq!(b.blocks(), [7, 8, 9]);
    cache.release(&mut a.kv);
    assert_eq!(free_list(&cache), [6, 10, 5, 4, 3, 2, 1]);
    cache.release(&mut b.kv);
    assert_eq!(free_list(&cache), [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]);

    let c = Holder::new(&mut cache, &tokens(0, 35), None);
    assert_eq!(c.blocks(), [1, 2, 6]);
    assert_eq!(free_list(&cache), [10, 5, 4, 3, 9, 8, 7]);
    cache.check([&c.kv].into_iter(), &mut Vec::new()).unwrap();
}

/// Reproduces vLLM's `test_prefill`: shared blocks are freed with their last holder.
#[test]
fn freed_blocks_queue_as_in_vllm_prefill() {
    let mut cache = full(16, 11);
    let common = tokens(0, 48);
    let with = |unique: u32, count: u32| [common.as_slice(), &tokens(unique, count)].concat();
    let mut a = Holder::new(&mut cache, &with(3000, 7), None);
    assert_eq!(a.blocks(), [1, 2, 3, 4]);
    let mut b = Holder::new(&mut cache, &with(4000, 5), None);
    assert_eq!(b.blocks(), [1, 2, 3, 5]);
    cache.check([&a.kv, &b.kv].into_iter(), &mut Vec::new()).unwrap();
    cache.release(&mut a.kv);
    cache.release(&mut b.kv);
    assert_eq!(free_list(&cache), [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]);

    let miss = Holder::new(&mut cache, &tokens(9000, 160), None);
    assert_eq!(miss.blocks(), [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]);
    assert!(free_list(&cache).is_empty());
    assert!(cache.exhausted());
}

#[test]
fn a_full_hit_leaves_the_last_block_to_compute() {
    let mut cache = full(4, 20);
    let _a = Holder::new(&mut cache, &tokens(0, 12), None);
    for (prompt, hit) in [(12, 8), (13, 12), (9, 8), (8, 4), (5, 4), (4, 0), (1, 0)] {
        assert_eq!(Holder::hit(&mut cache, &tokens(0, prompt), None), hit, "prompt of {prompt}");
    }
}

#[test]
fn the_salt_separates_entries() {
    let mut cache = full(4, 20);
    let _a = Holder::new(&mut cache, &tokens(0, 9), Some("a"));
    assert_eq!(Holder::hit(&mut cache, &tokens(0, 9), Some("a")), 8);
    assert_eq!(Holder::hit(&mut cache, &tokens(0, 9), Some("b")), 0);
    assert_eq!(Holder::hit(&mut cache, &tokens(0, 9), None), 0);
}

#[test]
fn growth_is_all_or_nothing() {
    let mut cache = caching(&spec(4, 8, &[KvKind::Full; 2]));
    let history = TokenHistory::new(tokens(0, 30).into());
    let mut kv = SequenceKv::new(cache.layout(), &history, Extras::default());
    assert!(cache.grow(&mut kv, 9));
    assert!(!cache.grow(&mut kv, 13), "one block is left for two groups");
    assert_eq!(kv.tables, [[1, 2, 3], [4, 5, 6]]);
    assert!(cache.exhausted());
    assert_eq!((cache.used(), cache.usage()), (6, 6.0 / 7.0));
    cache.check([&kv].into_iter(), &mut Vec::new()).unwrap();
}

/// Four tokens to a block, and a window of five: with a token that begins a block, the block before is seen.
const HYBRID: [KvKind; 2] = [KvKind::Full, KvKind::Window(5)];

#[test]
fn blocks_behind_a_window_are_free_and_can_be_found() {
    let mut cache = caching(&spec(4, 20, &HYBRID));
    let mut a = Holder::new(&mut cache, &tokens(0, 17), None);
    assert_eq!(a.kv.tables, [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]);
    cache.pass(&mut a.kv, 15);
    assert_eq!(a.kv.tables[1], [0, 0, 8, 9, 10], "the token at 15 sees those from 11 on");
    cache.pass(&mut a.kv, 16);
    assert_eq!(a.kv.tables[1], [0, 0, 0, 9, 10]);
    assert_eq!((cache.used(), &free_list(&cache)[8..]), (7, &[19, 6, 7, 8][..]));
    assert_eq!(Holder::hit(&mut cache, &tokens(0, 17), None), 16);
    let b = Holder::new(&mut cache, &tokens(0, 12), None);
    // A continuation at 8 does not see the first block. The third is computed again and makes way for the one that is found.
    assert_eq!(b.kv.tables, [[1, 2, 3], [0, 7, 8]]);
    cache.check([&a.kv, &b.kv].into_iter(), &mut Vec::new()).unwrap();
    cache.check_sequence(&a.kv, 17, 17).unwrap();
    cache.check_sequence(&b.kv, 12, 12).unwrap();
}

#[test]
fn a_hit_is_the_longest_that_every_group_can_serve() {
    let mut cache = caching(&spec(4, 12, &HYBRID));
    let mut a = Holder::new(&mut cache, &tokens(0, 20), None);
    cache.pass(&mut a.kv, 20);
    // The blocks 6 to 9 are free, 10 is held. Another sequence evicts the first two of them.
    assert_eq!((a.kv.tables[1].as_slice(), free_list(&cache)), (&[0, 0, 0, 0, 10][..], vec![11, 6, 7, 8, 9]));
    let mut b = Holder::new(&mut cache, &tokens(500, 4), None);
    assert_eq!(b.kv.tables, [[11], [6]]);
    assert_eq!(Holder::hit(&mut cache, &tokens(0, 21), None), 20, "the last block is enough");
    assert_eq!(Holder::hit(&mut cache, &tokens(0, 7), None), 0, "the first is gone");
    assert_eq!(Holder::hit(&mut cache, &tokens(0, 9), None), 8);
    cache.release(&mut b.kv);
    let _c = Holder::new(&mut cache, &tokens(900, 8), None);
    assert_eq!(Holder::hit(&mut cache, &tokens(0, 13), None), 0, "no other prefix can be served");
    assert_eq!(Holder::hit(&mut cache, &tokens(0, 21), None), 20);
}

#[test]
fn a_sequence_needs_no_more_blocks_than_its_windows_hold() {
    let spec = spec(4, 100, &[KvKind::Window(10), KvKind::Full]);
    let mut cache = KvCache::new(spec.blocks, KvLayout { step: 6, ..KvLayout::new(&spec, true) });
    let history = TokenHistory::new(tokens(0, 60).into());
    let mut kv = SequenceKv::new(cache.layout(), &history, Extras::default());
    let hit = cache.lookup(&mut kv, &history, usize::MAX);
    // Fifteen tokens of windows and a step lie in five blocks.
    assert_eq!((spec.blocks_for(60, 6), cache.missing(&kv, 60)), (5 + 15, 5 + 15));
    assert!(cache.fits(hit, 60, 79, 0.0) && !cache.fits(hit, 60, 80, 0.0));
    let mut most = 0;
    for end in (6..=60).step_by(6) {
        cache.pass(&mut kv, end - 6);
        let missing = cache.missing(&kv, 60);
        assert!(cache.grow(&mut kv, end));
        assert!(cache.used() + cache.missing(&kv, 60) <= 20, "{missing} blocks were missing");
        most = most.max(cache.used() - end.div_ceil(4));
    }
    assert_eq!((most, cache.missing(&kv, 60)), (5, 0));
}

#[test]
fn the_longest_sequence_that_fits_needs_all_blocks() {
    let fits = |blocks, kinds: &[KvKind]| spec(4, blocks, kinds).longest_sequence(6);
    assert_eq!(fits(10, &[KvKind::Full]), 36);
    assert_eq!(fits(10, &[KvKind::Full; 2]), 16);
    assert_eq!(fits(10, &[KvKind::Full, KvKind::Window(9)]), 16, "each group has four blocks");
    assert_eq!(fits(21, &[KvKind::Full, KvKind::Window(9)]), 60, "the window has five");
    assert_eq!(fits(6, &[KvKind::Window(9)]), usize::MAX);
    assert_eq!(fits(5, &[KvKind::Window(9)]), 16);
    assert_eq!(fits(1, &[KvKind::Full]), 0);
    assert_eq!(fits(1, &[]), usize::MAX);
}

#[test]
fn without_groups_everything_fits_and_nothing_is_found() {
    let mut cache = caching(&KvCacheSpec::default());
    let mut a = Holder::new(&mut cache, &tokens(0, 1000), None);
    assert_eq!(Holder::hit(&mut cache, &tokens(0, 1000), None), 0);
    assert_eq!((cache.usage(), cache.used(), cache.exhausted()), (0.0, 0, false));
    cache.release(&mut a.kv);
}

#[test]
fn generated_blocks_are_found_too() {
    let mut cache = full(4, 20);
    let mut a = Holder::new(&mut cache, &tokens(0, 6), None);
    a.history.output.extend([6, 7, 8, 9, 10]);
    assert!(cache.grow(&mut a.kv, 10));
    cache.commit(&mut a.kv, &a.history, 10);
    assert_eq!(Holder::hit(&mut cache, &tokens(0, 11), None), 8, "positions 8 to 10 fill no block");
}

#[test]
fn switched_off_nothing_is_kept() {
    let mut cache = KvCache::new(6, KvLayout::new(&spec(4, 6, &[KvKind::Full]), false));
    let mut a = Holder::new(&mut cache, &tokens(0, 8), None);
    cache.release(&mut a.kv);
    assert_eq!(free_list(&cache), [1, 2, 3, 4, 5], "the last block first, all at the head");
    assert_eq!(Holder::hit(&mut cache, &tokens(0, 9), None), 0);
}

/// Whether there is a salt, and the tokens up to the end of a block.
type Content = (bool, Vec<u32>);

#[derive(Clone, Debug)]
enum Act {
    Start { family: u32, len: usize, salt: bool },
    Extend { holder: usize, tokens: usize, passes: bool },
    End { holder: usize },
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        3 => (0..3u32, 1..30usize, any::<bool>()).prop_map(|(family, len, salt)| Act::Start { family, len, salt }),
        3 => (0..8usize, 1..9usize, any::<bool>())
            .prop_map(|(holder, tokens, passes)| Act::Extend { holder, tokens, passes }),
        2 => (0..8usize).prop_map(|holder| Act::End { holder }),
    ];
    prop::collection::vec(act, 1..60)
}

fn kinds() -> impl Strategy<Value = Vec<KvKind>> {
    prop::collection::vec(prop_oneof![Just(KvKind::Full), (1..16usize).prop_map(KvKind::Window)], 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Checks random sequences of operations: the pool stays consistent, a found block holds the requested tokens, and no
    /// longer prefix could be served.
    #[test]
    fn blocks_come_and_go(acts in acts(), blocks in 2..60usize, kinds in kinds(), block_size in 1..6usize) {
        let mut cache = caching(&spec(block_size, blocks, &kinds));
        let mut holders: Vec<Holder> = Vec::new();
        // The group and the whole prefix that each block was last filled with.
        let mut filled: Vec<Option<(usize, Content)>> = vec![None; blocks];
        for act in acts {
            match act {
                Act::Start { family, len, salt } => {
                    let prompt: Arc<[u32]> = (0..len as u32).map(|i| if i < 7 { i } else { family * 100 + i }).collect();
                    let history = TokenHistory::new(prompt);
                    let mut kv = SequenceKv::new(cache.layout(), &history, salted(salt.then_some("salt")));
                    let hit = cache.lookup(&mut kv, &history, usize::MAX);
                    prop_assert!(hit.tokens < len && hit.tokens.is_multiple_of(block_size));
                    for (group, (found, kind)) in cache.found.iter().zip(&kinds).enumerate() {
                        for (block, &id) in found.iter().enumerate() {
                            let seen = (block + 1) * block_size > kind.first_seen(hit.tokens);
                            prop_assert_eq!(id != NULL_BLOCK, seen);
                            let content = (salt, history.prompt[..(block + 1) * block_size].to_vec());
                            prop_assert!(!seen || filled[id as usize] == Some((group, content)));
                        }
                    }
                    let serves = |tokens: usize| (0..kinds.len()).all(|group| {
                        let first = kinds[group].first_seen(tokens) / block_size;
                        (first..tokens / block_size).all(|block| {
                            let key = BlockKey { chain: kv.keys[block], group: group as u32 };
                            cache.pool.find(&key, cache.layout.block_tokens(&history, block)).is_some()
                        })
                    });
                    let longest = (0..len).step_by(block_size).rev().find(|&tokens| serves(tokens));
                    prop_assert_eq!(longest, Some(hit.tokens));
                    if cache.fits(hit, len, 0, 0.0) {
                        cache.attach(&mut kv, hit);
                        prop_assert!(cache.grow(&mut kv, len));
                        holders.push(Holder { history, kv });
                    }
                }
                Act::Extend { holder, tokens, passes } if !holders.is_empty() => {
                    let at = holder % holders.len();
                    let Holder { history, kv } = &mut holders[at];
                    let len = history.len() as u32;
                    if passes {
                        cache.pass(kv, history.len());
                    }
                    if cache.grow(kv, history.len() + tokens) {
                        history.output.extend(len..len + tokens as u32);
                    }
                }
                Act::End { holder } if !holders.is_empty() => {
                    let mut gone = holders.swap_remove(holder % holders.len());
                    cache.release(&mut gone.kv);
                }
                _ => {}
            }
            for Holder { history, kv } in &mut holders {
                let salt = kv.extras.salt.is_some();
                for (group, table) in kv.tables.iter().enumerate() {
                    for block in kv.indexed..history.len() / block_size {
                        let prefix = history.span(0..(block + 1) * block_size).iter().collect();
                        filled[table[block] as usize] = Some((group, (salt, prefix)));
                    }
                }
                cache.commit(kv, history, history.len());
            }
            prop_assert_eq!(cache.check(holders.iter().map(|h| &h.kv), &mut Vec::new()), Ok(()));
            for Holder { history, kv } in &holders {
                prop_assert_eq!(cache.check_sequence(kv, history.len(), history.len()), Ok(()));
            }
        }
        for holder in &mut holders {
            cache.release(&mut holder.kv);
        }
        prop_assert_eq!(cache.used(), 0);
    }
}

fn hashes(cache: &KvCache, history: &TokenHistory) -> Vec<BlockHash> {
    SequenceKv::new(cache.layout(), history, Extras::default()).keys.iter().map(|key| key.0).collect()
}

#[test]
fn events_tell_what_can_be_found() {
    let mut cache = full(4, 6);
    cache.record_events();
    let prompt = tokens(0, 10);
    let mut first = Holder::new(&mut cache, &prompt, None);
    let all = hashes(&cache, &first.history);
    let stored = |parent, hashes: &[BlockHash], tokens: &[u32]| KvEvent::Stored {
        parent,
        hashes: hashes.to_vec(),
        tokens: tokens.to_vec(),
        block_size: 4,
        extra_keys: Vec::new(),
    };
    assert_eq!(cache.take_events(), [stored(None, &all[..2], &prompt[..8])], "full blocks, in one event");
    assert_eq!(cache.take_events(), []);

    // The third block becomes full.
    first.history.output.extend([10, 11]);
    cache.commit(&mut first.kv, &first.history, 12);
    let third = hashes(&cache, &first.history)[2];
    assert_eq!(cache.take_events(), [stored(Some(all[1]), &[third], &[8, 9, 10, 11])]);

    // Hits and content that is already indexed produce no events. Blocks without a prefix are evicted first, then the
    // last of the chain.
    cache.release(&mut first.kv);
    let mut second = Holder::new(&mut cache, &tokens(100, 12), None);
    let [KvEvent::Removed { hashes: gone }, KvEvent::Stored { parent: None, hashes: new, .. }] =
        &cache.take_events()[..]
    else {
        panic!("one block makes way for three")
    };
    assert_eq!((&gone[..], new.len()), (&[third][..], 3));
    cache.release(&mut second.kv);
    assert_eq!(Holder::hit(&mut cache, &prompt, None), 8);
    assert_eq!(cache.take_events(), []);
}

/// Returns the extra keys of all blocks stored since the last call, by event.
fn extra_keys(cache: &mut KvCache) -> Vec<Vec<Vec<ExtraKey>>> {
    let told = |event| match event {
        KvEvent::Stored { extra_keys, hashes, .. } => {
            assert!(extra_keys.is_empty() || extra_keys.len() == hashes.len());
            extra_keys
        }
        KvEvent::Removed { .. } => panic!("nothing makes way"),
    };
    cache.take_events().into_iter().map(told).collect()
}

/// Returns an image whose hash begins with `id`.
fn image(id: u8, start: u32, tokens: u32) -> PromptImage {
    let mut hash = [0; 32];
    hash[0] = id;
    let input = Arc::new(ImageInput { rows: 2, cols: 2 * tokens, patches: Box::new([0u8; 0]) });
    PromptImage { span: ImageSpan { start, rows: 1, cols: tokens }, hash: ImageHash(hash), input }
}

#[test]
fn an_image_is_part_of_the_keys_of_its_blocks_and_of_later_ones() {
    let mut cache = full(4, 20);
    cache.record_events();
    let prompt = [7; 16];
    let history = TokenHistory::new(prompt.as_slice().into());
    let mut prepared = |images: &[PromptImage], salt: Option<&str>| {
        let extras = Extras { images: images.into(), ..salted(salt) };
        let mut kv = SequenceKv::new(cache.layout(), &history, extras);
        let hit = cache.lookup(&mut kv, &history, usize::MAX);
        cache.attach(&mut kv, hit);
        assert!(cache.grow(&mut kv, history.len()));
        cache.commit(&mut kv, &history, history.len());
        cache.release(&mut kv);
        (hit.tokens, extra_keys(&mut cache))
    };
    let key = |image: &PromptImage, offset| ExtraKey::Image { hash: image.hash, offset };
    let [a, b] = [image(1, 5, 4), image(2, 9, 1)];
    let (hit, told) = prepared(&[a.clone(), b.clone()], None);
    assert_eq!(hit, 0);
    assert_eq!(told, [vec![vec![], vec![key(&a, 1)], vec![key(&a, -3), key(&b, 1)], vec![]]]);
    assert_eq!(prepared(&[a.clone(), b], None).0, 12, "the last token is computed");
    assert_eq!(prepared(&[a.clone(), image(3, 9, 1)], None).0, 8, "another second image");
    assert_eq!(prepared(&[image(1, 4, 4)], None).0, 4, "another place of the same image");
    assert_eq!(prepared(&[], None).0, 4, "the same tokens without an image");
    let (hit, told) = prepared(&[image(1, 2, 3)], Some("s"));
    let first = vec![key(&a, 2), ExtraKey::CacheSalt("s".into())];
    assert_eq!((hit, &told[0][..2]), (0, &[first, vec![key(&a, -2)]][..]));
}

#[test]
fn a_salt_is_told_with_the_first_block_of_a_sequence() {
    let mut cache = full(2, 9);
    cache.record_events();
    let mut holder = Holder::new(&mut cache, &[1, 2, 3], Some("s"));
    holder.history.output.push(4);
    cache.commit(&mut holder.kv, &holder.history, 4);
    let salts = vec![vec![ExtraKey::CacheSalt("s".into())], vec![]];
    assert_eq!(extra_keys(&mut cache), [salts], "what follows at once is the same event");
}

#[test]
fn a_block_computed_twice_makes_way_for_the_one_that_is_found() {
    let mut cache = full(4, 20);
    let history = TokenHistory::new(tokens(0, 9).into());
    let mut sequences = [(), ()].map(|()| SequenceKv::new(cache.layout(), &history, Extras::default()));
    for kv in &mut sequences {
        assert!(cache.grow(kv, 9));
    }
    let [first, second] = &mut sequences;
    cache.commit(first, &history, 9);
    cache.commit(second, &history, 9);
    assert_eq!((&first.tables[0][..], &second.tables[0][..]), (&[1, 2, 3][..], &[1, 2, 6][..]));
    assert_eq!(free_list(&cache)[..2], [5, 4], "the duplicates are free");
    // The first goes, and all free blocks are taken: the prefix is found as long as the second holds it.
    cache.release(first);
    let _other = Holder::new(&mut cache, &tokens(500, 64), None);
    assert!(cache.exhausted());
    assert_eq!(Holder::hit(&mut cache, &tokens(0, 9), None), 8);
}

#[test]
fn a_published_block_is_found_by_later_steps_once_it_is_complete() {
    let mut cache = full(4, 20);
    cache.record_events();
    let history = TokenHistory::new(tokens(0, 12).into());
    let mut kv = SequenceKv::new(cache.layout(), &history, Extras::default());
    let found = |cache: &mut KvCache| {
        let mut twin = SequenceKv::new(cache.layout(), &history, Extras::default());
        let hit = cache.lookup(&mut twin, &history, usize::MAX);
        (hit.tokens, hit.awaited)
    };
    for (step, end, same, next) in [(1, 6, (0, true), (4, true)), (2, 12, (4, true), (8, false))] {
        cache.begin(step);
        assert!(cache.grow(&mut kv, end));
        cache.publish(&mut kv, &history, end);
        assert_eq!(found(&mut cache), same, "step {step} does not read what it writes");
        cache.begin(step + 1);
        assert_eq!(found(&mut cache), next, "after step {step}");
    }
    assert!(cache.reads_from(&kv, 1) && !cache.reads_from(&kv, 3));
    cache.withdraw_since(2);
    assert_eq!(found(&mut cache), (4, false));
    let kinds = cache.take_events().iter().map(|event| matches!(event, KvEvent::Stored { .. })).collect::<Vec<_>>();
    assert_eq!(kinds, [true, false], "two blocks come and one goes, one that is not complete is not told");
}
