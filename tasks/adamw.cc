#include "tasks/adamw.h"

#include "fenwick/error.h"
#include "models/language_model.h"

namespace fenwick::tasks {

AdamW::AdamW(const torch::nn::Module& module, const AdamWOptions& options) : options_(options) {
  for (const auto& item : module.named_parameters()) {
    const torch::Tensor& parameter = item.value();
    if (!parameter.requires_grad()) continue;
    const bool low_precision = parameter.element_size() < 4;
    const torch::Tensor weight =
        low_precision ? parameter.detach().to(torch::kFloat32) : parameter.detach();
    slots_.push_back({item.key(), parameter, weight, torch::zeros_like(weight),
                      torch::zeros_like(weight),
                      torch::zeros({}, weight.options().dtype(torch::kFloat32)),
                      !models::SkipsWeightDecay(item.key(), parameter)});
  }
}

double AdamW::ClipGradients(double max_norm) {
  std::vector<torch::Tensor> gradients;
  for (const Slot& slot : slots_) {
    if (slot.parameter.grad().defined()) gradients.push_back(slot.parameter.grad());
  }
  std::vector<torch::Tensor> norms = at::_foreach_norm(gradients, 2);
  for (torch::Tensor& norm : norms) norm = norm.to(torch::kFloat64);
  const double norm = torch::stack(norms).norm().item<double>();
  if (max_norm > 0 && norm > max_norm) {
    at::_foreach_mul_(gradients, max_norm / norm);
  }
  return norm;
}

void AdamW::Step(double lr) {
  torch::NoGradGuard no_grad;
  for (const bool decays : {true, false}) {
    std::vector<torch::Tensor> weights, gradients, exp_avgs, exp_avg_sqs, steps;
    for (const Slot& slot : slots_) {
      if (slot.decays != decays || !slot.parameter.grad().defined()) continue;
      weights.push_back(slot.weight);
      gradients.push_back(slot.parameter.grad().to(slot.weight.scalar_type()));
      exp_avgs.push_back(slot.exp_avg);
      exp_avg_sqs.push_back(slot.exp_avg_sq);
      steps.push_back(slot.step);
    }
    if (weights.empty()) continue;
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(weights, gradients, exp_avgs, exp_avg_sqs, {}, steps, lr, options_.beta1,
                      options_.beta2, decays ? options_.weight_decay : 0.0, options_.eps,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
  for (Slot& slot : slots_) {
    if (!slot.weight.is_alias_of(slot.parameter)) slot.parameter.copy_(slot.weight);
  }
}

void AdamW::ZeroGradients() {
  for (Slot& slot : slots_) slot.parameter.mutable_grad().reset();
}

std::map<std::string, torch::Tensor> AdamW::State() const {
  std::map<std::string, torch::Tensor> state;
  for (const Slot& slot : slots_) {
    state[slot.name + ".weight"] = slot.weight;
    state[slot.name + ".exp_avg"] = slot.exp_avg;
    state[slot.name + ".exp_avg_sq"] = slot.exp_avg_sq;
    state[slot.name + ".step"] = slot.step;
  }
  return state;
}

void AdamW::Load(const std::map<std::string, torch::Tensor>& state) {
  torch::NoGradGuard no_grad;
  const std::map<std::string, torch::Tensor> mine = State();
  for (const auto& [name, tensor] : mine) {
    const auto found = state.find(name);
    if (found == state.end()) throw Error(name + ": missing");
    if (found->second.sizes() != tensor.sizes()) throw Error(name + ": another shape");
  }
  for (const auto& [name, tensor] : mine) tensor.copy_(state.at(name));
  for (Slot& slot : slots_) {
    if (!slot.weight.is_alias_of(slot.parameter)) slot.parameter.copy_(slot.weight);
  }
}

}  // namespace fenwick::tasks
