//! The weights of a program, each in the form in which its ops read it.

use octavo_ops::{BackendError, Op, Program, StorageType, WeightId, WeightSource};

use crate::pool::Pool;
use crate::weights::{self, Matrix, WeightDtype};

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

/// A loaded weight.
pub(crate) enum Loaded {
    Matrix(Matrix),
    Experts(Vec<Matrix>),
    Vector(Vec<f32>),
}

impl Loaded {
    /// Reads every weight of a program in its form. `progress` is called with the number of bytes read since the last
    /// call.
    pub(crate) fn read(
        program: &Program,
        dtype: WeightDtype,
        source: &dyn WeightSource,
        pool: &mut Pool,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<Self>, BackendError> {
        let read = |(weight, form)| {
            Ok(match form {
                WeightForm::Vector => Self::Vector(weights::load_vector(weight, source, progress)?),
                WeightForm::Matrix => Self::Matrix(weights::load(weight, dtype, source, pool, progress)?),
                WeightForm::Exact => Self::Matrix(weights::load_exactly(weight, source, pool, progress)?),
                WeightForm::Experts(count) => {
                    Self::Experts(weights::load_experts(weight, count, dtype, source, pool, progress)?)
                }
            })
        };
        program.weights.iter().zip(weight_forms(program)).map(read).collect()
    }

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

    /// Returns all matrices; none of a vector.
    pub(crate) fn matrices(&self) -> &[Matrix] {
        match self {
            Self::Matrix(matrix) => std::slice::from_ref(matrix),
            Self::Experts(experts) => experts,
            Self::Vector(_) => &[],
        }
    }
}
