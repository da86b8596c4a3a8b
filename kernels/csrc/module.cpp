// The extension: what its parts offer to Python.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace paged {

void bind(nb::module_& module);  // attention over keys and values in blocks, see attention_module.cpp

}  // namespace paged

namespace rows {

void bind(nb::module_& module);  // operations on rows, see rows_module.cpp

}  // namespace rows

namespace products {

void bind(nb::module_& module);  // products with packed weights, see products_module.cpp
void bind_blocks(nb::module_& module);  // products with weights in blocks, see block_products/module.cpp

}  // namespace products

namespace block_copies {

void bind(nb::module_& module);  // of lists of blocks, see block_copies/module.cpp

}  // namespace block_copies

namespace length_prediction {

void bind(nb::module_& module);  // of the router, see length_prediction.cpp

}  // namespace length_prediction

namespace request_table {

void bind(nb::module_& module);  // of schedulers, see request_table.cpp

}  // namespace request_table

namespace iteration_costs {

void bind(nb::module_& module);  // of what workers learn, see iteration_costs.cpp

}  // namespace iteration_costs

namespace decode_plan {

void bind(nb::module_& module);  // of a GPU's decodes, see decode_plan.cpp

}  // namespace decode_plan

namespace lora {

void bind(nb::module_& module);  // what adapters add to products, see lora/module.cpp

}  // namespace lora

namespace token_masks {

void bind(nb::module_& module);  // of grammars, see token_masks.cpp

}  // namespace token_masks

namespace states {

void bind(nb::module_& module);  // recurrent states, see states/module.cpp

}  // namespace states

namespace expert_products {

void bind(nb::module_& module);  // of a mixture, see expert_products.cpp

}  // namespace expert_products

namespace rank_exchange {

void bind(nb::module_& module);  // between the ranks of a worker, see rank_exchange/module.cpp

}  // namespace rank_exchange

namespace decode_pass {

void bind_parts(nb::module_& module);  // before what implements them; see decode_pass/module.cpp
void bind(nb::module_& module);

}  // namespace decode_pass

NB_MODULE(_native, module) {
    decode_pass::bind_parts(module);
    rows::bind(module);
    products::bind(module);
    products::bind_blocks(module);
    rank_exchange::bind(module);
    decode_pass::bind(module);
    expert_products::bind(module);
    block_copies::bind(module);
    length_prediction::bind(module);
    request_table::bind(module);
    iteration_costs::bind(module);
    decode_plan::bind(module);
    lora::bind(module);
    token_masks::bind(module);
    states::bind(module);
    paged::bind(module);
}
