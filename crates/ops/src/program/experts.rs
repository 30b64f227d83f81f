//! The rules of the ops of a mixture of experts.

use super::{BufferId, Element, ProgramBuilder, Rows, WeightId};
use crate::{ExpertLinear, ExpertSum, Lora, LoraInput, Op, ProgramError, Route};

impl ProgramBuilder {
    pub(super) fn route_rules(&self, r: &Route) -> Vec<(&'static str, usize, usize)> {
        let weight = self.weight_of(r.weight);
        let mut rules = vec![("the weight's columns", weight.cols, self.cols(r.input))];
        rules.extend(r.bias.map(|b| ("the bias", self.weight_of(b).elements(), weight.rows)));
        rules.extend(r.correction.map(|b| ("the correction", self.weight_of(b).elements(), weight.rows)));
        rules
    }

    pub(super) fn expert_linear_rules(&self, l: &ExpertLinear) -> Vec<(&'static str, usize, usize)> {
        let weight = self.weight_of(l.weight);
        let mut rules = vec![
            ("the input", self.cols(l.input), weight.cols),
            ("the weight's rows", weight.rows, self.cols(l.out).saturating_mul(l.experts)),
        ];
        rules.extend(l.bias.map(|b| ("the bias", self.weight_of(b).elements(), weight.rows)));
        rules
    }

    /// Returns the rows of buffers with a row for each token and expert of a routing.
    pub(super) fn routed(&self, routing: BufferId) -> Rows {
        Rows::Routed(self.cols(routing))
    }

    /// Checks that an op reads and writes experts only where it has them.
    pub(super) fn check_elements(&self, op: &Op) -> Result<(), ProgramError> {
        let routing = match op {
            Op::Route(op) => Some(op.out),
            Op::ExpertLinear(ExpertLinear { routing, .. })
            | Op::ExpertSum(ExpertSum { routing, .. })
            | Op::Lora(Lora { input: LoraInput::Experts { routing, .. }, .. }) => Some(*routing),
            _ => None,
        };
        for id in op.inputs().into_iter().chain(op.outputs()) {
            let buffer = &self.program.buffers[id.0];
            if (buffer.element == Element::Routing) != (routing == Some(id)) {
                let reason = match buffer.element {
                    Element::Routing => "has experts, expected numbers",
                    Element::Activation => "has numbers, expected experts",
                };
                return Err(self.invalid(op, format!("buffer '{}' {reason}", buffer.name)));
            }
        }
        Ok(())
    }

    /// Checks the numbers of experts and the rows of each.
    pub(super) fn check_experts(&self, op: &Op) -> Result<(), ProgramError> {
        match op {
            Op::Route(r) => self.check_route(op, r),
            Op::ExpertLinear(l) => {
                let rows = self.program.buffers[l.input.0].rows;
                if rows != Rows::Tokens && rows != self.routed(l.routing) {
                    return Err(self.invalid(op, format!("the input has {} rows", rows.symbol())));
                }
                let experts = self.program.ops.iter().rev().find_map(|known| match known {
                    Op::Route(r) if r.out == l.routing => Some(self.weight_of(r.weight).rows),
                    _ => None,
                });
                if experts != Some(l.experts) {
                    return Err(self.invalid(op, format!("{} experts, the router has {experts:?}", l.experts)));
                }
                [Some(l.weight), l.bias].into_iter().flatten().try_for_each(|id| self.check_slabs(op, id, l.experts))
            }
            Op::ExpertSum(s) if self.program.buffers[s.input.0].rows != self.routed(s.routing) => {
                Err(self.invalid(op, "the input has no row for each token and expert".into()))
            }
            _ => Ok(()),
        }
    }

    fn check_route(&self, op: &Op, r: &Route) -> Result<(), ProgramError> {
        let (experts, chosen) = (self.weight_of(r.weight).rows, self.cols(r.out));
        if chosen == 0 || chosen > experts {
            return Err(self.invalid(op, format!("{chosen} of {experts} experts are chosen")));
        }
        let Some(groups) = r.groups else { return Ok(()) };
        let sound =
            groups.count > 0 && experts.is_multiple_of(groups.count) && (1..=groups.count).contains(&groups.kept);
        if !sound || experts / groups.count * groups.kept < chosen {
            return Err(self.invalid(op, format!("{chosen} of {experts} experts are chosen from {groups:?}")));
        }
        Ok(())
    }

    /// Checks that the weights of the experts or heads have parts of the same sizes.
    pub(super) fn check_slabs(&self, op: &Op, id: WeightId, experts: usize) -> Result<(), ProgramError> {
        let weight = self.weight_of(id);
        let each = weight.parts.len() / experts.max(1);
        let alike = each > 0 && weight.parts.len() == each * experts && {
            let rows = |parts: &[super::WeightPart]| parts.iter().map(|part| part.rows).collect::<Vec<_>>();
            let first = rows(&weight.parts[..each]);
            weight.parts.chunks(each).all(|parts| rows(parts) == first)
        };
        if alike {
            return Ok(());
        }
        Err(self
            .invalid(op, format!("the parts of weight '{}' are not those of {experts} equal matrices", weight.name)))
    }

    pub(super) fn invalid(&self, op: &Op, reason: String) -> ProgramError {
        ProgramError::Invalid(format!("op {} ({}): {reason}", self.program.ops.len(), op.name()))
    }
}
