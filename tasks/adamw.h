// AdamW (Loshchilov and Hutter, arXiv 1711.05101) over the parameters of a module, in two groups:
// with weight decay, and without (models::SkipsWeightDecay). Parameters below float32 have a
// float32 copy that the updates are applied to. The state is kept by parameter name.
#pragma once

#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

namespace fenwick::tasks {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
};

class AdamW {
 public:
  AdamW(const torch::nn::Module& module, const AdamWOptions& options);

  // Scales all gradients so that their global norm is at most `max_norm` (0: no limit); returns
  // the norm before.
  double ClipGradients(double max_norm);
  void Step(double lr);
  void ZeroGradients();

  // "NAME.weight" (the copy that is updated), "NAME.exp_avg", "NAME.exp_avg_sq", "NAME.step".
  std::map<std::string, torch::Tensor> State() const;
  // Restores a state and the parameters with it. Throws Error naming what is missing.
  void Load(const std::map<std::string, torch::Tensor>& state);

 private:
  struct Slot {
    std::string name;
    torch::Tensor parameter;
    torch::Tensor weight;  // the parameter itself where it is float32 or float64
    torch::Tensor exp_avg;
    torch::Tensor exp_avg_sq;
    torch::Tensor step;  // [] float32
    bool decays;
  };

  AdamWOptions options_;
  std::vector<Slot> slots_;
};

}  // namespace fenwick::tasks
