//! The weights of a program, each in the form in which its ops read it.

use octavo_ops::{BackendError, Op, Program, StorageType, WeightId, WeightSource};

use crate::pool::Worker;
use crate::weights::{self, Matrix, Target, WeightDtype};

/// Form in which a weight is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WeightForm {
    /// A matrix that is multiplied.
    Matrix,
    /// A matrix in f32: a router.
    Exact,
    /// A matrix for each of so many experts or heads.
    Experts(usize),
    /// Numbers that are read: norms, biases and attention sinks.
    Vector,
}

/// Returns the form of each weight.
fn weight_forms(program: &Program) -> Vec<WeightForm> {
    let mut found = vec![WeightForm::Matrix; program.weights.len()];
    for op in &program.ops {
        let mut set = |id: WeightId, form| found[id.0] = form;
        let vectors = match op {
            Op::Norm(op) => vec![Some(op.weight), op.bias],
            Op::Linear(op) => vec![op.bias],
            Op::GatherColumns(op) => vec![Some(op.order)],
            Op::QkvPost(op) => op.norm.iter().flat_map(|norm| [Some(norm.q), Some(norm.k)]).collect(),
            Op::HeadLinear(op) => {
                set(op.weight, WeightForm::Experts(op.heads));
                vec![]
            }
            Op::LatentPost(op) => vec![Some(op.norm)],
            Op::PagedAttention(op) => vec![op.sinks],
            Op::Route(op) => {
                set(op.weight, WeightForm::Exact);
                vec![op.bias, op.correction]
            }
            Op::ExpertLinear(op) => {
                set(op.weight, WeightForm::Experts(op.experts));
                vec![op.bias]
            }
            _ => vec![],
        };
        vectors.into_iter().flatten().for_each(|id| set(id, WeightForm::Vector));
    }
    found
}

/// Returns the storage types of a program's matrices that are not kept as they are, and the types in which they are kept.
pub(crate) fn conversions(program: &Program, dtype: WeightDtype) -> Vec<(StorageType, StorageType)> {
    let kept = |weight: &WeightForm| matches!(weight, WeightForm::Matrix | WeightForm::Experts(_));
    let matrices: Vec<_> = program.weights.iter().zip(weight_forms(program)).filter(|(_, form)| kept(form)).collect();
    let found = |storage| matrices.iter().any(|(weight, _)| weight.parts.iter().any(|part| part.storage == storage));
    let pairs = StorageType::ALL.into_iter().map(|storage| (storage, weights::kept_as(storage, dtype)));
    pairs.filter(|&(storage, kept)| kept != storage && found(storage)).collect()
}

/// Returns the size of a program's matrices in memory in bytes. Vectors are small.
pub(crate) fn matrix_bytes(program: &Program, dtype: WeightDtype) -> u64 {
    let bytes = |(weight, form)| match form {
        WeightForm::Matrix | WeightForm::Experts(_) => weights::bytes_of(weight, dtype),
        WeightForm::Exact | WeightForm::Vector => 0,
    };
    program.weights.iter().zip(weight_forms(program)).map(bytes).fold(0, u64::saturating_add)
}

/// The weights of a program by [`WeightId`], once for all threads or in a copy for each NUMA node.
pub(crate) struct Copies(Vec<Vec<Loaded>>);

impl Copies {
    /// Reads every weight of a program in its form. `progress` is called with the number of bytes read since the last
    /// call.
    pub(crate) fn read(
        program: &Program,
        mut target: Target<'_>,
        source: &dyn WeightSource,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, BackendError> {
        let mut copies: Vec<Vec<Loaded>> = target.arenas.iter().map(|_| Vec::new()).collect();
        let target = &mut target;
        for (weight, form) in program.weights.iter().zip(weight_forms(program)) {
            let loaded: Vec<Loaded> = match form {
                WeightForm::Vector => {
                    let values = weights::load_vector(weight, source, progress)?;
                    copies.iter().map(|_| Loaded::Vector(values.clone())).collect()
                }
                WeightForm::Matrix => in_form(weights::load(weight, target, source, progress)?, Loaded::Matrix),
                WeightForm::Exact => in_form(weights::load_exactly(weight, target, source, progress)?, Loaded::Matrix),
                WeightForm::Experts(count) => {
                    in_form(weights::load_experts(weight, count, target, source, progress)?, Loaded::Experts)
                }
            };
            copies.iter_mut().zip(loaded).for_each(|(copy, loaded)| copy.push(loaded));
        }
        Ok(Self(copies))
    }

    /// Returns the weights, for what does not read their numbers: layouts and sizes.
    pub(crate) fn shapes(&self) -> &[Loaded] {
        &self.0[0]
    }

    /// Returns the weights in the memory that is nearest to a thread.
    pub(crate) fn near(&self, worker: Worker<'_>) -> &[Loaded] {
        match &self.0[..] {
            [one] => one,
            each => &each[worker.node()],
        }
    }

    /// Returns the size of all copies in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().flatten().map(Loaded::bytes).sum()
    }
}

fn in_form<T>(copies: Vec<T>, form: impl Fn(T) -> Loaded) -> Vec<Loaded> {
    copies.into_iter().map(form).collect()
}

/// A loaded weight.
pub(crate) enum Loaded {
    Matrix(Matrix),
    Experts(Vec<Matrix>),
    Vector(Vec<f32>),
}

impl Loaded {
    /// Returns the matrix of a weight that products or an embedding read.
    pub(crate) fn factor(&self) -> &Matrix {
        match self {
            Self::Matrix(matrix) => matrix,
            Self::Experts(_) | Self::Vector(_) => unreachable!("loaded as `weight_forms` says"),
        }
    }

    /// Returns the matrix of each expert or head.
    pub(crate) fn experts(&self) -> &[Matrix] {
        match self {
            Self::Experts(experts) => experts,
            Self::Matrix(_) | Self::Vector(_) => unreachable!("loaded as `weight_forms` says"),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Vector(values) => size_of_val(&values[..]) as u64,
            Self::Matrix(_) | Self::Experts(_) => self.matrices().iter().map(Matrix::bytes).sum(),
        }
    }

    /// Returns all matrices; none of a vector.
    pub(crate) fn matrices(&self) -> &[Matrix] {
        match self {
            Self::Matrix(matrix) => std::slice::from_ref(matrix),
            Self::Experts(experts) => experts,
            Self::Vector(_) => &[],
        }
    }
}

#[cfg(test)]
mod tests;
